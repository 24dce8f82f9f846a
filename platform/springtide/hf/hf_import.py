"""Read a model's folder in the format of transformers, and write it as a checkpoint with weights but no optimizer state.

    config.json -> family and ModelConfig -> required tensors -> their byte ranges -> fp32 -> a checkpoint

All names, types, shapes and offsets are checked before anything is written, and no code of the folder is run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from springtide.checkpoint.format import IMPORTED, Manifest, Meta, StagedPiece
from springtide.checkpoint.leases import Lease
from springtide.checkpoint.tensors import raw, type_of
from springtide.checkpoint.validate import ITEM_BYTES
from springtide.checkpoint.weights_only import PART_BYTES, write_weights
from springtide.config.engine import ModelConfig
from springtide.corpus.hub import pinned
from springtide.corpus.tokenizer import Tokenizer
from springtide.corpus.tokenizer_probe import probe
from springtide.errors import ConfigError, SpringtideError, explain, printable, redacted
from springtide.hf.export_files import MARKER
from springtide.hf.families import Family
from springtide.hf.hf_config import FILE, read_config
from springtide.hf.hf_files import ids_of, read_generation, read_settings, read_tokenizer
from springtide.hf.hf_tokenizer import BOS_LABEL, EOS_LABEL, their_template, token_of
from springtide.hf.safetensors_header import Stored, read_tensors
from springtide.model import skeleton
from springtide.shards import TOKENIZER
from springtide.storage import Folder, digest, to_json

TYPES = ("F32", "BF16", "F16", "F64")
"""Types of weights, as named in safetensors files, that can be imported."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Rotary tables that old releases of transformers stored as tensors. An import ignores them, because the config determines
their values."""
_SHOWN = 5
_COMPARE_BYTES = 16 * 2**20

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where the rows of one tensor of springtide's decoder are stored in the model's folder."""

    folder: Folder
    stored: Stored
    """The tensor of transformers, as stored in a file, that contains the rows."""
    first: int
    """Index of the first row within ``stored``; above 0 if transformers joins several tensors into one."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ImportedModel:
    """A model's folder in the format of transformers. It is checked, but its weights are not read yet."""

    folder: Folder
    family: Family
    model: ModelConfig
    places: Mapping[str, Place]
    """Springtide's name of a tensor -> where it is stored."""
    tokenizer: str
    """Text of the ``tokenizer.json``, in the form that datasets store; empty if there is none."""
    eos_id: int | None
    bos_id: int | None
    """Id that begins a text. None if neither the tokenizer nor the chat template puts it before texts, even if config.json
    names an id."""
    adapter: str = ""
    """URL of the adapter that was imported with the model; empty if there is none."""
    template: str = ""
    """Text of the model's chat template; empty if the model has no chat template or no tokenizer."""
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings kept from ``generation_config.json``: the ids that end a text or a turn, and how tokens are sampled."""

    @property
    def end_of_text(self) -> str:
        """The token that ends a text; empty if it is not known."""
        return token_of(self.tokenizer, self.eos_id) or "" if self.tokenizer else ""

    @property
    def begin_of_text(self) -> str:
        """The token that begins a text, and each chat. Empty if the model has none, or has a chat template that does not write
        one."""
        has_none = not self.tokenizer or (self.template and "bos_token" not in self.template)
        return "" if has_none else token_of(self.tokenizer, self.bos_id) or ""


def model_folder(url: str) -> Folder:
    """Return the folder of a model. A URL of the Hugging Face Hub, ``hf://OWNER/NAME[@REVISION]``, is pinned to its current
    commit. Raises ConfigError if huggingface_hub is not installed, CorpusError if the repository cannot be found or reached."""
    return Folder(pinned(url, "folder", "hf://OWNER/NAME"))


def open_model(folder: Folder) -> ImportedModel:
    """Check a model's folder and return its contents. The weights themselves are not read, only the headers of their files.
    One exception: a head that is tied to the embedding, but stored separately, is compared with the embedding.

    Raises:
        ConfigError: an unknown architecture, or a setting that the decoder does not compute; tensors that are missing,
            unexpected or of another shape or type; pickles in place of safetensors; a file that is damaged, too large, or a
            link that leads out of the folder.
    """
    folder = folder.confined()
    if not folder.exists(FILE):
        remedy = "give a folder that save_pretrained of transformers wrote"
        raise ConfigError(explain("folder", folder.url, f"has no {FILE}", remedy))
    config = read_settings(folder, FILE)
    family, model = read_config(config, folder.where(FILE))
    stored = read_tensors(folder)
    places = _matched(folder, family, model, stored)
    eos_id, bos_id = (
        next(iter(ids_of(config.get(key), model.vocab_size)), None) for key in ("eos_token_id", "bos_token_id")
    )
    generation = read_generation(folder, config, model.vocab_size)
    text = template = ""
    if folder.exists(TOKENIZER):
        data = read_tokenizer(folder)
        probe(data, folder.where(TOKENIZER))
        # pass the id 0 if the end-of-text id is unknown: the tokenizer requires one, but it is not used here
        vocabulary = Tokenizer.from_json(data, folder.where(TOKENIZER), eos_id or 0)
        if vocabulary.size > model.vocab_size:
            vocabulary = _without_ids_beyond(data, folder.where(TOKENIZER), model.vocab_size, eos_id or 0) or vocabulary
        if vocabulary.size > model.vocab_size:
            problem = f"has more ids than the {model.vocab_size} rows of the embedding"
            remedy = "resize the embedding by transformers' resize_token_embeddings, and save the model again"
            raise ConfigError(explain(folder.where(TOKENIZER), vocabulary.size, problem, remedy))
        text, template = vocabulary.to_json(), their_template(folder)
        # keep bos_id for springtide's exports (with MARKER): they were trained with it before each text, even if no tokenizer
        # adds it
        if not (folder.exists(MARKER) or _is_written(bos_id, vocabulary, template)):
            bos_id = None
    return ImportedModel(folder, family, model, places, text, eos_id, bos_id, template=template, generation=generation)


def write_checkpoint(
    found: ImportedModel,
    to: Folder,
    config: Mapping[str, Any],
    fingerprint: str,
    part_bytes: int = PART_BYTES,
    lease: Lease | None = None,
) -> Manifest:
    """Write the weights of ``found``, in fp32, as the checkpoint of step 0 in ``to``; return its manifest. ``config``,
    ``fingerprint``: config and fingerprint of the run that the checkpoint belongs to. ``lease``: the caller's exclusive right
    to write to ``to``; None if the folder needs no lease.

    Raises:
        ConfigError: a weight is not a finite number.
    """
    labels = {IMPORTED: redacted(found.folder.url), "architecture": found.family.architecture}
    labels |= {"adapter": found.adapter} if found.adapter else {}
    for label, index in ((EOS_LABEL, found.eos_id), (BOS_LABEL, found.bos_id)):
        labels |= {label: str(index)} if index is not None else {}
    meta = Meta(
        step=0,
        tokens=0,
        world_size=1,
        order_identity="",
        config_fingerprint=fingerprint,
        tokenizer_digest=digest.of_bytes(found.tokenizer.encode()) if found.tokenizer else "",
        saved_s=time.time(),
        labels=labels,
    )
    kinds = {f"model/{name}": ("F32", place.shape) for name, place in found.places.items()}
    return write_weights(to, meta, config, kinds, lambda one: _read(found, one), part_bytes, lease)


def read_weights(found: ImportedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the imported model: springtide's name and the value, fp32. Raises ConfigError if a weight is not a
    finite number."""
    for name, (_, _, _, shape) in found.places.items():
        whole = StagedPiece(name, "F32", shape, (0,) * len(shape), shape, 0, 4 * math.prod(shape))
        yield name, _read(found, whole).view(torch.float32).view(shape)


def _read(found: ImportedModel, one: StagedPiece) -> Tensor:
    """Read the rows of a tensor that ``one`` describes, and convert them to fp32. Returns their bytes as a flat tensor, uint8
    (bytes,)."""
    folder, stored, first, shape = found.places[one.tensor.removeprefix("model/")]
    row = math.prod(shape[1:]) * ITEM_BYTES[stored.dtype]
    begin = stored.begin + (first + one.offsets[0]) * row
    data = bytearray(one.sizes[0] * row)
    read = 0
    for part in folder.stream(stored.file, begin, begin + len(data)):
        data[read : read + part.nbytes] = part
        read += part.nbytes
    if read != len(data):
        problem = f"ended after {read} of {len(data)} bytes of {one.tensor}"
        raise ConfigError(explain(folder.where(stored.file), read, problem, "download it again"))
    tensor = torch.frombuffer(data, dtype=type_of(stored.dtype)).float()
    if not bool(torch.isfinite(tensor).all()):
        problem = f"has numbers that are not finite, in rows of {one.tensor.removeprefix('model/')}"
        raise ConfigError(explain(folder.where(stored.file), stored.dtype, problem, "import another copy"))
    return raw(tensor)


def _matched(folder: Folder, family: Family, model: ModelConfig, stored: Mapping[str, Stored]) -> dict[str, Place]:
    """Return where each tensor of ``model`` is stored: springtide's name -> place. Raises ConfigError, with the tensors' names,
    if the stored tensors do not fit ``model``."""
    try:
        shapes = {name: tuple(one.shape) for name, one in skeleton(model, model.vocab_size).named_parameters()}
    except RuntimeError as error:  # a shape has more elements than torch can count
        problem = f"makes a model that is too large ({str(error)[:100]})"
        raise ConfigError(explain(folder.where(FILE), model.dim, problem, "correct the file")) from None
    matches = list(family.tensors(model))
    known = {match.theirs for match in matches}
    if missing := sorted(known - stored.keys()):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        problem = f"lacks {len(missing)} tensors of {family.architecture}{more}"
        remedy = "download all files, or correct num_hidden_layers and tie_word_embeddings in its config.json"
        raise ConfigError(explain("folder", missing[:_SHOWN], problem, remedy))
    extra = sorted(name for name in stored.keys() - known if not _BUFFERS.fullmatch(name))
    if extra == [_HEAD] and model.tied_head:
        _check_same(folder, stored[_HEAD], stored[_EMBEDDING])
    elif extra:
        problem = f"are tensors that {family.architecture} of this config.json does not have"
        remedy = (
            "the config.json is of another model, or the weights are quantised or an adapter: import the plain model, "
            "and the adapter with --adapter"
        )
        raise ConfigError(explain("folder", extra[:_SHOWN], problem, remedy))
    found = {}
    for theirs, ours in matches:
        one, named = stored[theirs], f"{folder.where(stored[theirs].file)}: {theirs}"
        expected = (sum(shapes[name][0] for name in ours), *shapes[ours[0]][1:])
        if one.shape != expected:
            problem = f"its config.json makes it {list(expected)}"
            raise ConfigError(explain(named, list(one.shape), problem, "give the config.json of these weights"))
        if one.dtype not in TYPES:
            remedy = "dequantise the model and save it as float32 or bfloat16"
            raise ConfigError(explain(f"{named}: dtype", one.dtype, f"is not one of {', '.join(TYPES)}", remedy))
        first = 0
        for name in ours:
            found[name] = Place(folder, one, first, shapes[name])
            first += shapes[name][0]
    return dict(sorted(found.items()))


def _check_same(folder: Folder, head: Stored, embedding: Stored) -> None:
    """Compare a separately stored head with the embedding. Raise ConfigError if they differ although the config ties them (says
    that they share one matrix)."""
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    for begin in range(0, head.size_bytes if same else 0, _COMPARE_BYTES):
        end = min(begin + _COMPARE_BYTES, head.size_bytes)
        one, other = (folder.read_range(at.file, at.begin + begin, at.begin + end) for at in (head, embedding))
        same = same and one == other
    if not same:
        problem = f"differs from {_EMBEDDING}, with which config.json ties it"
        raise ConfigError(explain(_HEAD, list(head.shape), problem, "set tie_word_embeddings to false in config.json"))


def _without_ids_beyond(data: str, where: str, rows: int, end: int) -> Tokenizer | None:
    """Return the tokenizer without added tokens that have no row in the embedding, such as Gemma 3's token for images. The text
    of such a token is then encoded as plain text. Returns None if the tokenizer does not work without these tokens."""
    spec = json.loads(data)
    added = spec.get("added_tokens")
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        return None
    left = [one for one in added if type(one.get("id")) is int and one["id"] >= rows]
    spec["added_tokens"] = [one for one in added if one not in left]
    try:
        found = Tokenizer.from_json(to_json(spec), where, end)
    except SpringtideError:
        return None
    if found.size > rows:
        return None
    names = printable(", ".join(str(one.get("content")) for one in left[:_SHOWN]))
    _log.warning("%s: %d added tokens have no row in the embedding and are left out: %s", where, len(left), names)
    return found


def _is_written(bos_id: int | None, vocabulary: Tokenizer, template: str) -> bool:
    """Return True if the tokenizer begins texts with ``bos_id``, or the chat template writes the begin-of-text token."""
    return "bos_token" in template or vocabulary.tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
