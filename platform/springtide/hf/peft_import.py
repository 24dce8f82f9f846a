"""Read an adapter's folder in the format of PEFT, given the imported base model.

    adapter_config.json -> rank, scale, targets -> required tensors -> their places in adapter_model.safetensors

The tensors determine which matrices are adapted. Names of modules are compared as text. Patterns in the folder, which are
regular expressions of an untrusted file, are never run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from springtide.checkpoint.adapters import LORA_A, LORA_B, MAGNITUDE, is_adapter
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.hf.adapters import PEFT_CONFIG, PEFT_NAMES, PEFT_WEIGHTS
from springtide.hf.hf_files import read_settings
from springtide.hf.hf_import import TYPES, ImportedModel, Place
from springtide.hf.safetensors_header import Stored, read_header
from springtide.model import matrices, skeleton
from springtide.storage import Folder

_MOST_RANK, _MOST_ALPHA = 2**16, 2**31
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_SHOWN = 5
_MERGE = "merge it where it was made, by merge_and_unload of PEFT, and import the merged model"
_COPY = "download the adapter again"
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config"),
    }
)
"""Keys that change nothing in what the adapter computes. Dropout acts only in training; the named base model is not opened."""
_READ_ELSEWHERE = frozenset(
    {
        *("r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("layers_to_transform", "exclude_modules"),
    }
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "layers_pattern": ("layers", ["layers"]),
}
"""Key of adapter_config.json -> its supported values. Null, false and empty values are supported, too. An unsupported value of
init_lora_weights means that the adapter was trained on changed weights of the base model."""
_REMEDIES = {
    "peft_type": "import a LoRA or DoRA adapter",
    "fan_in_fan_out": "set it to false in the file, as PEFT does for these models",
    "init_lora_weights": "save the adapter with path_initial_model_for_weight_conversion of PEFT",
}


class _Adapter(NamedTuple):
    """Settings of an adapter_config.json."""

    rank: int
    alpha: float
    """Value for ``model.adapter_alpha``: the adapter is scaled by alpha / rank."""
    dora: bool


class _Part(NamedTuple):
    """What an adapter tensor's name says: the module that it adapts, and its kind (lora_A, lora_B or magnitude: a value of
    ``PEFT_NAMES``)."""

    module: str
    kind: str


def with_adapter(found: ImportedModel, folder: Folder) -> ImportedModel:
    """Return ``found`` with the LoRA or DoRA adapter of ``folder`` added. The adapter is checked, but its tensors are not read
    yet.

    Raises:
        ConfigError: no adapter, a pickled adapter, an unsupported setting, an adapter of another model, or a damaged file. The
            message names the key or the tensor.
    """
    folder = folder.confined()
    config = _read_config(folder)
    adapter = _settings(config, folder.where(PEFT_CONFIG))
    modules = _modules(found)
    tensors = _tensors(folder, found, modules)
    adapted = {part.module for part in tensors}
    _check_targets(config, adapted, modules, folder.where(PEFT_CONFIG), found.family.architecture)
    targets = _patterns({ours for one in adapted for ours in modules[one]}, modules)
    fields: dict[str, Any] = {"adapter": "dora" if adapter.dora else "lora", "adapter_rank": adapter.rank}
    fields |= {"adapter_alpha": adapter.alpha, "adapter_targets": targets}
    model = ModelConfig(**{**found.model.model_dump(), **fields})
    places = {**found.places, **dict(_places(folder, model, modules, tensors, adapter))}
    return dataclasses.replace(found, model=model, places=dict(sorted(places.items())), adapter=folder.url)


def _read_config(folder: Folder) -> dict[str, Any]:
    names = folder.names()
    if PEFT_CONFIG not in names:
        remedy = "give a folder that save_pretrained of PEFT wrote"
        raise ConfigError(explain("adapter", folder.url, f"has no {PEFT_CONFIG}", remedy))
    if PEFT_WEIGHTS not in names:
        if pickle := next((one for one in names if one.endswith((".bin", ".pt", ".pth", ".pkl"))), None):
            remedy = (
                "where you trust it, load it by PEFT and save it again: "
                'PeftModel.from_pretrained(model, FOLDER).save_pretrained("FOLDER-safe")'
            )
            raise ConfigError(
                explain(folder.where(pickle), pickle, "is a pickle, which runs code when it is read", remedy)
            )
        raise ConfigError(explain("adapter", folder.url, f"has no {PEFT_WEIGHTS}", _COPY))
    return read_settings(folder, PEFT_CONFIG)


def _settings(config: Mapping[str, Any], where: str) -> _Adapter:
    """Return the adapter's settings. Raises ConfigError for a key whose value is not supported."""
    for key, value in config.items():
        if key not in _HARMLESS | _READ_ELSEWHERE:
            _check_key(key, value, where)
    rank, alpha = _number(config, "r", _MOST_RANK, where), _number(config, "lora_alpha", _MOST_ALPHA, where)
    if rank != int(rank):
        raise ConfigError(explain(f"{where}: r", rank, "is not a whole number", "correct the file"))
    for key, usual in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        table = config.get(key) or {}
        if not isinstance(table, dict) or any(one != usual for one in table.values()):
            problem = "has another rank or scale in some matrices, and here they are the same in all"
            raise ConfigError(explain(f"{where}: {key}", table, problem, _MERGE))
    # rsLoRA scales by alpha / sqrt(rank) (Kalajdzievski, arXiv 2312.03732), but springtide by alpha / rank: multiply alpha by
    # sqrt(rank)
    alpha *= math.sqrt(rank) if _flag(config, "use_rslora", where) else 1.0
    return _Adapter(int(rank), alpha, _flag(config, "use_dora", where))


def _check_key(key: str, value: Any, where: str) -> None:
    """Raise ConfigError if the value of the key in adapter_config.json is not supported."""
    if value is None or value is False or value in ([], {}, ""):
        return
    if not any(value == one and type(value) is type(one) for one in _ONLY.get(key, ())):
        remedy = _REMEDIES.get(key, _MERGE)
        raise ConfigError(explain(f"{where}: {key[:100]}", value, "is not computed here", remedy))


def _number(config: Mapping[str, Any], key: str, most: int, where: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        problem = f"is not a number above 0 and up to {most}"
        raise ConfigError(explain(f"{where}: {key}", value, problem, "correct the file"))
    return value


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ConfigError(explain(f"{where}: {key}", value, "is not true or false", "correct the file"))
    return bool(value)


def _modules(found: ImportedModel) -> dict[str, tuple[str, ...]]:
    """Return the modules of transformers that may have an adapter: name of the module -> springtide's matrices that it consists
    of."""
    ours = {name for name, _ in matrices(skeleton(found.model, found.model.vocab_size).blocks)}
    matches = (match for match in found.family.tensors(found.model) if ours.issuperset(match.ours))
    return {match.theirs.removesuffix(_WEIGHT): match.ours for match in matches}


def _tensors(folder: Folder, found: ImportedModel, modules: Mapping[str, tuple[str, ...]]) -> dict[_Part, Stored]:
    """Return where the adapter's tensors are stored. Raises ConfigError for a tensor that belongs to no matrix of the model."""
    by_name: dict[_Part, Stored] = {}
    where = folder.where(PEFT_WEIGHTS)
    for name, stored in read_header(folder, PEFT_WEIGHTS).items():
        kind = next((one for one in PEFT_NAMES.values() if name.endswith(f".{one}")), "")
        module = name.removeprefix(_PREFIX).removesuffix(f".{kind}")
        if not kind or not name.startswith(_PREFIX) or module not in modules:
            problem = f"is a tensor of no adapted matrix of this {found.family.architecture}"
            remedy = f"give the model that the adapter was made on; or {_MERGE}"
            raise ConfigError(explain(where, name[:200], problem, remedy))
        if stored.dtype not in TYPES:
            problem = f"is not one of {', '.join(TYPES)}"
            raise ConfigError(explain(f"{where}: {name}: dtype", stored.dtype, problem, "save it as float32"))
        by_name[_Part(module, kind)] = stored
    if not by_name:
        raise ConfigError(explain(where, [], "has no tensors", _COPY))
    return by_name


def _check_targets(config: Mapping[str, Any], adapted: Set[str], known: Iterable[str], where: str, of: str) -> None:
    """Raise ConfigError if the target modules in ``config`` differ from ``adapted``, the modules that have adapter tensors.
    Targets given as a pattern are not checked, because a pattern of an untrusted folder is never run."""
    targets, excluded, layers = (
        config.get(key) for key in ("target_modules", "exclude_modules", "layers_to_transform")
    )
    layers = [layers] if isinstance(layers, int) else layers
    for key, value, kind in (("exclude_modules", excluded, str), ("layers_to_transform", layers, int)):
        if not isinstance(value, str | None) and not _are(kind, value):
            problem = f"is not a list of {'names' if kind is str else 'numbers'}"
            raise ConfigError(explain(f"{where}: {key}", value, problem, "correct the file"))
    if isinstance(targets, str) or isinstance(excluded, str):
        return
    if not targets or not _are(str, targets):
        raise ConfigError(explain(f"{where}: target_modules", targets, "are not names of modules", "correct the file"))
    tails = {name: set(_tails(name)) for name in known}
    if strange := set(targets) - set().union(*tails.values()):
        problem = f"are modules that this {of} does not have, or whose adapter is not computed here"
        remedy = "remove those from the list that no tensor of the adapter is of, or import its merged model"
        raise ConfigError(explain(f"{where}: target_modules", sorted(strange)[:_SHOWN], problem, remedy))
    named, left_out, numbers = set(targets), set(excluded or ()), set(layers or ())
    expected = {
        name
        for name, those in tails.items()
        if those & named and not those & left_out and (not numbers or _layer(name) in numbers)
    }
    if differs := sorted(expected ^ adapted):
        has = "have no tensors" if differs[0] in expected else "have tensors, and are not targets"
        remedy = "give the model that the adapter was made on, and all of its file"
        raise ConfigError(explain(f"{where}: target_modules", differs[:_SHOWN], has, remedy))


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is kind for one in values)


def _tails(module: str) -> Iterator[str]:
    """Yield all names by which ``target_modules`` may select ``module``: its full name, and the rest of it after each dot."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _layer(module: str) -> int:
    return int(module.removeprefix("model.layers.").partition(".")[0])


def _patterns(adapted: Set[str], modules: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return patterns for ``model.adapter_targets`` that match the matrices ``adapted`` and no other matrices."""
    every = {ours for one in modules.values() for ours in one}
    if adapted == every:
        return ("*",)
    found = set()
    for name in adapted:
        last = name.split(".", 2)[2]
        alike = {one for one in every if one.split(".", 2)[2] == last}
        found.add(f"blocks.*.{last}" if alike <= adapted else name)
    return tuple(sorted(found))


def _places(
    folder: Folder,
    model: ModelConfig,
    modules: Mapping[str, tuple[str, ...]],
    tensors: Mapping[_Part, Stored],
    adapter: _Adapter,
) -> Iterator[tuple[str, Place]]:
    """Yield each adapter tensor: springtide's name and the place where it is stored. If a module of transformers joins several
    matrices of springtide, these matrices share the module's A, and each has its own rows of B and of the magnitude. Raises
    ConfigError for a tensor that is missing, unexpected or of another shape."""
    named = skeleton(model, model.vocab_size).named_parameters()
    shapes = {name: tuple(one.shape) for name, one in named if is_adapter(name)}
    where = folder.where(PEFT_WEIGHTS)
    kinds = [LORA_A, LORA_B, *((MAGNITUDE,) if adapter.dora else ())]
    wanted = {_Part(part.module, PEFT_NAMES[kind]) for part in tensors for kind in kinds}
    if differs := sorted(wanted ^ tensors.keys()):
        told = [f"{_PREFIX}{one.module}.{one.kind}" for one in differs[:_SHOWN]]
        problem = "are missing" if differs[0] in wanted else "are not of a LoRA adapter, and its config has no use_dora"
        raise ConfigError(explain(where, told, problem, _COPY))
    for module, kind in sorted({(part.module, kind) for part in tensors for kind in kinds}):
        stored, parts = tensors[_Part(module, PEFT_NAMES[kind])], modules[module]
        of_each = [shapes[f"{ours.removesuffix(_WEIGHT)}.{kind}"] for ours in parts]
        rows = of_each[0][0] if kind == LORA_A else sum(shape[0] for shape in of_each)
        if stored.shape != (expected := (rows, *of_each[0][1:])):
            problem = f"the model and r = {adapter.rank} make it {list(expected)}"
            remedy = "give the model that the adapter was made on"
            named_there = f"{where}: {_PREFIX}{module}.{PEFT_NAMES[kind]}"
            raise ConfigError(explain(named_there, list(stored.shape), problem, remedy))
        first = 0
        for ours, shape in zip(parts, of_each, strict=True):
            yield f"{ours.removesuffix(_WEIGHT)}.{kind}", Place(folder, stored, first, shape)
            first += 0 if kind == LORA_A else shape[0]
