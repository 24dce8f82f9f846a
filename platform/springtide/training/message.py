"""What the ranks of a group agree on in a step: fields by name, summed over all ranks in one all-reduce.

    message.sum("loss", nats)         a sum over ranks; of a tensor (n,), n sums
    message.any("saving", True)       True if it is True on any rank
    message.by_rank("speed", 0.2)     the value of each rank
    message.digest("samples", n)      a sum of 64-bit integers modulo 2**64

Every rank adds the same fields in the same order, so positions follow from that. The fields are compared in the first step of
a group. In a later step, a rank that cannot send them sends a flag and as many zeros as the others wait for. Either way all
ranks raise an error that names the rank, and none of them waits for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from springtide.distributed import World, gathered, sum_over_ranks
from springtide.errors import SpringtideError

_LIMBS = 4
_LIMB_BITS = 16
_FAILED = "failed"

Fields = tuple[tuple[str, str, int, bool], ...]
"""Name, kind, length of each field, and whether its values are on the device."""


class PartFailed(RuntimeError):
    """Parts of a rank add other fields than those of the other ranks, or than in the step before."""


class PeerFailed(PartFailed):
    """A part raised on another rank, which raises the error itself."""


class FieldsOfGroup:
    """The fields that every message of a worker group has; None before its first message."""

    def __init__(self) -> None:
        self.known: Fields | None = None


class StepMessage:
    """The message of one rank in one step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fields: dict[str, tuple[str, int, bool]] = {}
        self._on_device: list[Tensor] = []
        """Values that stay on the device until all have been summed."""
        self._on_host: list[float] = []
        self._failure: Exception | None = None
        self.any(_FAILED, False)

    def sum(self, name: str, value: Tensor | float) -> None:
        """Add a sum over ranks: of a number or a scalar tensor, or one for each element of a tensor (n,)."""
        if isinstance(value, Tensor):
            self._add(name, "sums" if value.dim() else "sum", value)
        else:
            self._add(name, "sum", [float(value)])

    def any(self, name: str, value: bool) -> None:
        """Add a flag that is True if it is True on any rank."""
        self._add(name, "any", [float(value)])

    def by_rank(self, name: str, value: Tensor | float) -> None:
        """Add the value of this rank, a number or a scalar tensor."""
        rank, size = self._world.rank, self._world.size
        if isinstance(value, Tensor):
            slots = torch.zeros(size, dtype=torch.float64, device=self._world.device)
            slots[rank] = value
            self._add(name, "by_rank", slots)
        else:
            self._add(name, "by_rank", [float(value) if one == rank else 0.0 for one in range(size)])

    def digest(self, name: str, value: int) -> None:
        """Add a sum of unsigned 64-bit integers modulo 2**64. It is exact: float64 sums of limbs of 16 bits are."""
        self._add(name, "digest", [float(value >> _LIMB_BITS * limb & (2**_LIMB_BITS - 1)) for limb in range(_LIMBS)])

    def collect(self, source: str, contribute: Callable[[], None]) -> None:
        """Call ``contribute``, which adds fields. If it raises, ``exchange`` raises its error on this rank, and on the others
        one that names this rank and ``source``."""
        try:
            contribute()
        except Exception as error:
            self._failure, self._source = self._failure or error, source

    def exchange(self, group: FieldsOfGroup) -> Agreed:
        """Sum over all ranks, which call it together: the step's only wait for the device.

        Raises:
            Exception: what a part raised on this rank, or a SpringtideError that it raised on another one.
            PeerFailed: a part raised on another rank.
            PartFailed: ranks or steps have different fields.
            CollectiveError: the sums are garbage.
        """
        fields: Fields = tuple((name, *rest) for name, rest in self._fields.items())
        if group.known is None:
            self._compare(fields)
            group.known = fields
        if fields != group.known and not self._failure:
            self._failure = PartFailed(f"other fields than in the step before: {_difference(fields, group.known)}")
        if self._failure:
            self._send_zeros(group.known)
        device = self._world.device
        numbers = torch.tensor(self._on_host, dtype=torch.float64, device=device)
        sums = sum_over_ranks(torch.cat([*self._on_device, numbers]), self._world)
        agreed = Agreed(_read(group.known, sums))
        if agreed[_FAILED]:
            self._raise(gathered(self._told()))
        return agreed

    def _add(self, name: str, kind: str, values: Tensor | list[float]) -> None:
        if name in self._fields:
            raise ValueError(f"two parts add the field {name!r} to the step's message")
        if isinstance(values, Tensor):
            one = values.detach().to(self._world.device, torch.float64).reshape(-1)
            self._fields[name] = kind, len(one), True
            self._on_device.append(one)
        else:
            self._fields[name] = kind, len(values), False
            self._on_host += values

    def _compare(self, fields: Fields) -> None:
        """Raise PartFailed, on all ranks, if a part failed on any of them or their fields differ."""
        mine = self._told(), fields
        everyone = [mine] if self._world.size == 1 else gathered(mine)
        self._raise([failure for failure, _ in everyone])
        first = everyone[0][1]
        for rank, (_, theirs) in enumerate(everyone):
            if theirs != first:
                difference = _difference(theirs, first)
                raise PartFailed(f"rank {rank}: other fields than rank 0: {difference}; start the same code")

    def _told(self) -> Exception | None:
        """Return what the other ranks raise because of this one; None if nothing failed here."""
        error = self._failure
        if error is None or isinstance(error, PartFailed | SpringtideError):
            return error
        return PeerFailed(f"{self._source} raised {type(error).__name__}: {error}")

    def _raise(self, failures: Sequence[Exception | None]) -> None:
        """Raise if a part has failed on some rank. ``failures``: by rank, what ``_told`` returns there."""
        if self._failure is not None and not isinstance(self._failure, PartFailed):
            raise self._failure
        for rank, failure in enumerate(failures):
            if isinstance(failure, PartFailed):
                raise type(failure)(f"rank {rank}: {failure}")
            if failure is not None:
                raise failure

    def _send_zeros(self, fields: Fields) -> None:
        """Replace what was added: the other ranks wait for a message of this length."""
        on_device = sum(length for _, _, length, is_on_device in fields if is_on_device)
        self._on_device = [torch.zeros(on_device, dtype=torch.float64, device=self._world.device)]
        self._on_host = [
            float(name == _FAILED)
            for name, _, length, is_on_device in fields
            for _ in range(length * (not is_on_device))
        ]


class Agreed(dict[str, Any]):
    """What all ranks know after the exchange, by name: float, tuple of floats, bool or int, by the kind of the field."""


def _read(fields: Fields, sums: list[float]) -> dict[str, Any]:
    found = dict[str, Any]()
    begins = [0, sum(length for _, _, length, is_on_device in fields if is_on_device)]
    for name, kind, length, is_on_device in fields:
        place = not is_on_device
        values = sums[begins[place] : begins[place] + length]
        begins[place] += length
        match kind:
            case "sum":
                found[name] = values[0]
            case "any":
                found[name] = values[0] > 0
            case "digest":
                found[name] = sum(int(limb) << _LIMB_BITS * at for at, limb in enumerate(values)) % 2**64
            case _:
                found[name] = tuple(values)
    return found


def _difference(fields: Fields, expected: Fields) -> str:
    """Return the first fields that differ, as text: name, kind and length."""
    more, less = (
        [f"{name} ({kind}, {length})" for name, kind, length, place in one if (name, kind, length, place) not in other]
        for one, other in ((fields, expected), (expected, fields))
    )
    if not more and not less:
        return "the same ones in another order"
    return f"{', '.join(more[:3]) or 'none'} in place of {', '.join(less[:3]) or 'none'}"
