"""Tokens/s and memory of LoRA, against transformers with PEFT and torch's AdamW; short chats in packed rows, or padded.

    text     rows of text; both clients train on the same rows in the same order
    chats    short chats: ours packs whole chats into rows, none of which attends to another; the peer has one chat a row,
             padded to the longest of its micro-batch, as collators of transformers do; each step has the same chats

The same small Llama with random weights and the same adapter, made here and exported to the peer; float32; each client in a
fresh process, rounds alternating. Losses of every step agree within 1e-3 nats, or there is no result. Memory is the peak of the
steps over what the process had when model and adapter were loaded.

    python benchmarks/finetune.py [--quick] [--json] [--rounds 5] [--steps 20]
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import numpy as np

WARM_UP_STEPS = 4
TOLERANCE = 1e-3
"""Most that the losses of a step may differ by [nats]."""
TASKS = ("text", "chats")
GOALS = {"lora_vs_peft": (1.0, "higher"), "lora_memory_vs_peft": (0.8, "lower"), "packed_vs_padded": (2.0, "higher")}
MODEL = {"num_layers": 4, "dim": 256, "ffn_dim": 704, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 4096}
SMALL = {"num_layers": 2, "dim": 64, "ffn_dim": 160, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 512}
"""For --quick."""
ADAPTER = {"adapter": "lora", "adapter_rank": 16, "adapter_alpha": 32.0}
BATCH, LENGTH, RATE = 8, 256, 1e-3


def config_of(folder: str, task: str, steps: int, small: bool) -> Any:
    """The config of a run of ours on ``task``."""
    import springtide as st

    length, model = LENGTH // (2 if small else 1), {**(SMALL if small else MODEL), **ADAPTER, "tied_head": False}
    changes = {
        **{f"model.{key}": value for key, value in model.items()},
        "run.root": f"{folder}/runs",
        "run.id": "base",
        "shards.root": f"{folder}/datasets",
        "shards.sequence_length": length,
        "model.max_sequence_length": LENGTH,
        "corpus.tokenizer": "bytes",
        "corpus.max_files": 40,
        "stream.global_batch": BATCH,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "train.micro_batch": BATCH,
        "train.total": steps * BATCH * length,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "train.start_from": f"{folder}/runs/base/checkpoints/step-0000000001",
        "train.start_with": "weights",
        "optim.warmup": 0,
        "optim.peak_lr": RATE,
        "optim.final_lr_ratio": 1.0,
        "checkpoint.every_steps": 0,
        "parallel.reduction": "fp32",
        "elastic.max_workers": 1,
        "track.progress": False,
    }
    if task == "chats":
        changes |= {"corpus.source": f"{folder}/chats.jsonl", "corpus.chat_template": "chatml", "corpus.max_files": 0}
        changes |= {"shards.packing": "best_fit", "shards.mask_across_documents": True}
    return st.recipes.demo().override(changes)


def write_chats(file: Path, count: int, longest: int) -> None:
    """Chats whose lengths have a long tail, as those of people."""
    draw = random.Random(0)
    lines = []
    for number in range(count):
        size = min(longest, 3 + int(draw.lognormvariate(2.3, 0.6)))
        words = [f"{draw.randrange(100)}" for _ in range(size)]
        asked, answer = f"{number}: {' '.join(words[: size // 3])}", " ".join(words[size // 3 :])
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    file.write_text("\n".join(lines))


def prepared(folder: str, steps: int, small: bool) -> dict[str, Any]:
    """Write the datasets, the model with its adapter for both, and the rows of each step for the peer; the configs of ours."""
    import springtide as st
    from springtide.checkpoint.format import Meta
    from springtide.checkpoint.tensors import raw
    from springtide.checkpoint.weights_only import write_weights
    from springtide.model import build
    from springtide.run.exchange import export_model
    from springtide.run.folder import Run
    from springtide.storage import Folder
    from springtide.stream import RankReader, load, open_data

    write_chats(Path(folder) / "chats.jsonl", 300 if small else 4000, 12 if small else 48)
    found = {}
    for task in TASKS:
        config = st.prepare(config_of(folder, task, steps, small))
        data = open_data(config.data)
        reader = RankReader(data, 0, 1)
        batches = list(load(reader, reader.plan(0, config.num_steps, int(config.feed.read_bytes))))
        ends = [*data.document_ids] if data.eos_id is not None else []
        rows = {"ids": np.stack([one.ids for one in batches]), "labels": np.stack([one.labels for one in batches])}
        np.savez(f"{folder}/{task}.npz", ends=np.array(ends, dtype=np.int64), **rows)
        found[task] = config.model_dump(mode="json")
    model = build(config.model, config.model.vocab_size)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    kinds = {name: ("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    meta = Meta(step=1, tokens=1, world_size=1, order_identity="o", config_fingerprint="c")

    def data_of(piece: Any) -> Any:
        begin, count = (piece.offsets[0], piece.sizes[0]) if piece.sizes else (0, 1)
        return raw(tensors[piece.tensor][begin : begin + count].contiguous())

    base = Folder(f"{folder}/runs/base")
    write_weights(base, meta, found["text"], kinds, data_of)
    run = Run(base)
    run.write_config(config)
    export_model(run, f"{folder}/base")  # its adapter adds nothing yet
    export_model(run, f"{folder}/adapter", format="peft")
    return found


def ours(told: dict[str, Any], number: int) -> dict[str, Any]:
    """The loop of a run, as under torchrun, on each task."""
    import os

    import torch

    from springtide.config import build
    from springtide.distributed import process_group, world
    from springtide.events import Started, StepDone
    from springtide.storage import Folder
    from springtide.stream import load, open_data
    from springtide.training import TrainLoop

    found = {}
    store, where = claims.meeting_place()
    os.environ.update(where, RANK="0", WORLD_SIZE="1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with process_group(device):
        for task in TASKS:
            config, meter = build(told[task]), Meter()
            run = TrainLoop(config, world(device), open_data(config.data), Folder(config.run.root) / f"{task}-{number}")

            def feed(reader: Any, step: int, config: Any = config) -> Any:
                return load(reader, reader.plan(step, config.num_steps, int(config.feed.read_bytes)))

            for event in run.events(feed, lambda: None):
                if isinstance(event, Started):
                    meter.begin()
                if isinstance(event, StepDone):
                    meter.step(event.loss)
            found[task] = meter.found()
    del store
    return found


def peer(folder: str, told: dict[str, Any]) -> dict[str, Any]:
    """The loop that one writes with transformers and PEFT."""
    import peft
    import torch
    import torch.nn.functional as F
    import transformers

    device, found = torch.device("cuda" if torch.cuda.is_available() else "cpu"), {}
    for task in TASKS:
        optim = told[task]["optim"]
        batches, meter = list(_batches(f"{folder}/{task}.npz")), Meter()
        base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True).to(device).train()
        trained = [one for one in model.parameters() if one.requires_grad]
        options = {"lr": RATE, "betas": tuple(optim["betas"]), "eps": optim["eps"], "fused": True}
        optimizer = torch.optim.AdamW(trained, weight_decay=optim["weight_decay"], **options)
        meter.begin()
        for micro_batches in batches:
            count, total = sum(int((targets != -100).sum()) for _, targets, _ in micro_batches), 0.0
            for ids, targets, mask in micro_batches:
                there = mask if mask is None else mask.to(device)
                logits = model(input_ids=ids.to(device), attention_mask=there, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum") / count
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(trained, optim["clip_norm"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            meter.step(total)
        found[task] = meter.found()
        del base, model, optimizer, trained
    return found


def _batches(file: str) -> Any:
    """The micro-batches of each step: ids, targets and mask. Rows as they are, or one document a row, where they are apart."""
    import torch

    from springtide.model.positions import documents

    data = np.load(file)
    for ids, labels in zip(torch.from_numpy(data["ids"]), torch.from_numpy(data["labels"]), strict=True):
        ids, targets = ids[:, :-1], labels[:, 1:]
        if not len(data["ends"]):
            yield [(ids, targets, None)]
            continue
        position, _ = documents(ids, *(int(one) for one in data["ends"][:2]), are_whole=bool(data["ends"][2]))
        found = []
        for row, wanted, place in zip(ids, targets, position, strict=True):
            begins = [*torch.nonzero(place == 0).flatten().tolist(), len(row)]
            spans = [slice(*pair) for pair in itertools.pairwise(begins)]
            found += [(row[span], wanted[span]) for span in spans if bool((wanted[span] != -100).any())]
        pad = torch.nn.utils.rnn.pad_sequence
        micro_batches = []
        for first in range(0, len(found), BATCH):
            some = found[first : first + BATCH]
            mask = pad([torch.ones_like(row) for row, _ in some], batch_first=True)
            wanted = pad([targets for _, targets in some], batch_first=True, padding_value=-100)
            micro_batches.append((pad([row for row, _ in some], batch_first=True), wanted, mask))
        yield micro_batches


class Meter:
    """Seconds, losses and memory of steps."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []
        self._losses: list[float] = []
        self._before_mib = 0.0

    def begin(self) -> None:
        """The first step is next."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        self._before_mib = claims.peak_mib()

    def step(self, loss: float) -> None:
        """A step has ended."""
        self._ends.append((time.perf_counter(), time.process_time()))
        self._losses.append(loss)

    def found(self) -> dict[str, Any]:
        """The median step, which a busy neighbour does not move; ``cpu_s`` is what all its threads took."""
        step_s, cpu_s = np.median(np.diff(self._ends, axis=0)[WARM_UP_STEPS - 1 :], axis=0).tolist()
        mib = claims.peak_mib() - self._before_mib
        return {"step_s": step_s, "cpu_s": cpu_s, "losses": self._losses, "mib": mib}


def measure(folder: str, rounds: int, steps: int, small: bool) -> list[dict[str, Any]]:
    """What each client found, by round."""
    told = claims.alone(prepared, folder, steps, small)
    rows = []
    for number in range(rounds):
        row = {}
        for client in ("ours", "peer") if number % 2 == 0 else ("peer", "ours"):
            row[client] = claims.alone(ours, told, number) if client == "ours" else claims.alone(peer, folder, told)
        for task in TASKS:
            pairs = zip(row["ours"][task]["losses"], row["peer"][task]["losses"], strict=True)
            if (most := max(abs(one - other) for one, other in pairs)) > TOLERANCE:
                raise RuntimeError(f"the clients do not train the same: losses of {task} differ by {most:.4g}")
            told_of = []
            for client, one in row.items():
                seconds = f"{one[task]['step_s']:.3f} s a step ({one[task]['cpu_s']:.3f} s of CPU)"
                told_of.append(f"{client} {seconds}, {one[task]['mib']:.0f} MiB")
            print(f"round {number + 1}, {task}: {'; '.join(told_of)}; losses within {most:.1e}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Print the table and the claims."""
    options = claims.options(__doc__, rounds=5, steps=(20, WARM_UP_STEPS + 2))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(folder, int(options.rounds), int(options.steps), options.quick)

    def ratio(task: str, what: str) -> float:
        return statistics.median(row["ours"][task][what] / row["peer"][task][what] for row in rows)

    values = {"lora_vs_peft": 1 / ratio("text", "step_s"), "packed_vs_padded": 1 / ratio("chats", "step_s")}
    values["lora_memory_vs_peft"] = ratio("text", "mib")
    claims.show(options, [claims.claim(name, values[name], *goal, rows) for name, goal in GOALS.items()])


if __name__ == "__main__":
    main()
