"""Targets: models and adapters of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

from fuzz.target import Target, must
from springtide.checkpoint.tensors import type_of
from springtide.config.engine import ModelConfig
from springtide.corpus import TEMPLATE_BYTES, BadChat, ChatTemplate, Tokenizer, open_tokenizer
from springtide.corpus.chat_template import BUILT_IN
from springtide.corpus.chats import Turn
from springtide.errors import ConfigError
from springtide.hf import HF_CONFIG, open_model, read_weights, with_adapter
from springtide.hf.adapters import PEFT_CONFIG, PEFT_WEIGHTS
from springtide.hf.hf_config import choose_family, written_config
from springtide.hf.hf_tokenizer import SETTINGS
from springtide.hf.safetensors_header import SINGLE, Entry, header_of
from springtide.model import skeleton
from springtide.shards import TOKENIZER
from springtide.storage import Folder

VOCABULARY, RANK = 264, 2


def tensors_of(entries: list[Entry]) -> bytes:
    """Return a file of safetensors; its numbers are ones."""
    data = header_of(entries, {"format": "pt"})
    return data + b"".join(b"\0\0\x80\x3f" * (one.size_bytes // 4) for one in entries)


class Models(Target):
    """A small Llama as transformers saves it, and a LoRA adapter as PEFT does."""

    name = "import"
    share = 2

    def make(self) -> None:
        shape = {"num_layers": 2, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "vocab_size": VOCABULARY}
        model = ModelConfig.model_validate({**shape, "max_sequence_length": 32})
        family = choose_family(model)
        shapes = {name: tuple(one.shape) for name, one in skeleton(model, VOCABULARY).named_parameters()}
        entries, adapter = [], []
        for theirs, ours in family.tensors(model):
            rows, rest = sum(shapes[one][0] for one in ours), shapes[ours[0]][1:]
            entries.append(Entry(theirs, "F32", (rows, *rest)))
            if ".q_proj." in theirs:
                module = f"base_model.model.{theirs.removesuffix('.weight')}"
                adapter.append(Entry(f"{module}.lora_A.weight", "F32", (RANK, *rest)))
                adapter.append(Entry(f"{module}.lora_B.weight", "F32", (rows, RANK)))
        told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"]}
        told |= {"bias": "none", "use_dora": False, "lora_dropout": 0.0, "rank_pattern": {}, "revision": None}
        files = {
            HF_CONFIG: json.dumps(written_config(family, model, VOCABULARY, "float32", (1,), 0)).encode(),
            SINGLE: tensors_of(entries),
            TOKENIZER: open_tokenizer("bytes", (), 0).to_json().encode(),
            SETTINGS: json.dumps({"eos_token": "<|endoftext|>", "chat_template": BUILT_IN["plain"]}).encode(),
            f"adapter/{PEFT_CONFIG}": json.dumps(told).encode(),
            f"adapter/{PEFT_WEIGHTS}": tensors_of(adapter),
        }
        for name, data in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(data)

    def kinds(self) -> Mapping[str, str]:
        return {name: "json" if name.endswith(".json") else "safetensors" for name in self.before}

    def names(self) -> tuple[str, ...]:
        """Tensors that do not fit a config are in the one file or the other."""
        both = (HF_CONFIG, SINGLE) if "/" not in self.changed else (PEFT_CONFIG, PEFT_WEIGHTS)
        return (*super().names(), *both) if self.changed in (TOKENIZER, SETTINGS) else both

    def read(self, random: Random) -> None:
        found = with_adapter(open_model(Folder(self.root)), Folder(self.root / "adapter"))
        for place in found.places.values():
            size = place.folder.size(place.stored.file)
            must(place.stored.begin + place.stored.size_bytes <= size, f"a tensor past the end of {place.stored.file}")
            type_of(place.stored.dtype)
        for name, tensor in read_weights(found):
            must(bool(tensor.isfinite().all()), f"{name} is not finite")
        if found.template and self.changed in (TOKENIZER, SETTINGS):
            must(len(found.template.encode()) <= TEMPLATE_BYTES, "a large template")
            end = found.eos_id or 0
            vocabulary = Tokenizer.from_json(found.tokenizer, TOKENIZER, end)
            try:
                ChatTemplate(SETTINGS, found.template, vocabulary, found.bos_id).prompt([Turn("user", "Sing the sea")])
            except BadChat as error:
                raise ConfigError(f"{SETTINGS}: {error.problem}") from None


TARGETS: tuple[type[Target], ...] = (Models,)
