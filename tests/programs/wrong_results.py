"""Ranks whose device computes wrong results: bits of what one layer returns are flipped, and nothing raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from loops import feed

from springtide.config import Config
from springtide.distributed import World
from springtide.distributed import world as world_of
from springtide.errors import UnfitNode
from springtide.events import Event
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.tracking.journal import Journal
from springtide.training import GroupContext, TrainLoop, recheck

EXPONENT = 1 << 26
LOW_BIT = 1 << 14


def flip(run: TrainLoop, since: int, bits: int, same_place: bool, until: int = 10**9) -> None:
    """Flip ``bits`` of one number that the last layer of the first block returns, in the steps from ``since`` on."""
    random = torch.Generator().manual_seed(1)

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if since <= run.state.step + 1 < until and module.training:
            flat = output.data.view(-1)  # no autograd: as a register would change
            place = 3 if same_place else int(torch.randint(len(flat), (), generator=random))
            flat[place : place + 1].view({2: torch.int16, 4: torch.int32}[flat.element_size()]).bitwise_xor_(bits)

    block = run.state.model.blocks[0]
    getattr(block, "_checkpoint_wrapped_module", block).ffn.down.register_forward_hook(hook)


def in_turn(world: World, *calls: tuple[Config, dict[str, Any]]) -> list[tuple[list[Event], str]]:
    """Train several runs, one after the other, in the same processes: what ``train_with_flips`` returns of each."""
    return [train_with_flips(world, config, **named) for config, named in calls]


def train_with_flips(
    world: World,
    config: Config,
    wrong: Sequence[int] = (),
    since: int = 1,
    bits: int = EXPONENT,
    same_place: bool = True,
    until: int = 10**9,
    checked: Sequence[int] | None = None,
) -> tuple[list[Event], str]:
    """Train where ranks ``wrong`` compute wrong results. Returns the events, and the error that ended it. ``checked``: the
    steps that are checked, if the clock is not to decide."""
    nodes = [f"node-{rank}" for rank in range(world.size)]
    here = world_of("cpu", 0, config.parallel.shards)
    folder = Folder(config.run.root) / config.run.id
    run = TrainLoop(config, here, open_data(config.data), folder, context=GroupContext(nodes=nodes))
    if checked is not None:
        of_clock: Callable[..., bool] = recheck.is_due
        recheck.is_due = lambda *_: run.state.step + 2 in checked
    if world.rank in wrong:
        flip(run, since, bits, same_place, until)
    events: list[Event] = []
    said = ""
    with Journal(folder, enabled=world.is_first) as journal:
        try:
            for event in run.events(feed, lambda: None):
                journal(event)
                events.append(event)
        except (UnfitNode, recheck.DevicesDisagree) as error:
            said = f"{type(error).__name__}: {error}"
            said += f" ({error.node})" if isinstance(error, UnfitNode) else ""
    if checked is not None:
        recheck.is_due = of_clock
    return events, said
