"""Write an export as one GGUF file, which llama.cpp and what is built on it load.

    springtide model export runs/RUN --to hf --out exports/RUN
    python examples/gguf/to_gguf.py exports/RUN RUN.gguf --dtype q8_0

Reads the export's headers and one tensor at a time. The file gets its name when it is complete.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_families import ROPE_FACTORS, GgufFamily, Value, gguf_family, gguf_metadata, rope_factors
from gguf_tokenizer import tokenizer_metadata

from springtide.checkpoint.tensors import type_of
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, SpringtideError, explain
from springtide.hf import open_model
from springtide.hf.safetensors_header import Stored, read_tensors
from springtide.storage import Folder

Kind = gguf.GGMLQuantizationType
DTYPES = {"fp32": Kind.F32, "bf16": Kind.BF16, "fp16": Kind.F16, "q8_0": Kind.Q8_0}
"""``--dtype`` -> type of the matrices. Vectors are fp32."""
STORED = {"F64": Kind.F32, "F32": Kind.F32, "BF16": Kind.BF16, "F16": Kind.F16}
"""Type in the export -> type of the matrices, without ``--dtype``."""
FILE_TYPES = {Kind.F32: 0, Kind.F16: 1, Kind.Q8_0: 7, Kind.BF16: 32}
"""Type of the matrices -> general.file_type."""
LARGEST = {Kind.F16: 65504.0, Kind.Q8_0: 65504.0 * 127}
"""Largest number that a type has room for; a block of q8_0 has its scale in fp16."""


class Writer(gguf.GGUFWriter):
    """As of the gguf package, with empty lists of strings: a byte tokenizer has no merges, and llama.cpp reads that."""

    def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
        if vtype == gguf.GGUFValueType.ARRAY and not val:
            return struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
        return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))


def convert(export: str, target: str, dtype: str = "") -> list[str]:
    """Write the file ``target``; return remarks for the user.

    Args:
        export: folder of an export, or of a model as transformers saves it.
        target: file to write.
        dtype: type of the matrices, a key of DTYPES; empty is the type that they are stored in.

    Raises:
        ConfigError: the folder holds no such model, llama.cpp computes another model than it, or makes other ids of a text, or
            a type has no room for a number.
    """
    if dtype and dtype not in DTYPES:
        raise ConfigError(explain("dtype", dtype, f"is not one of {', '.join(DTYPES)}", "omit it for the stored type"))
    found = open_model(Folder(export))  # checks config.json and all headers; no code of the folder runs
    model, folder = found.model, found.folder
    stored = read_tensors(folder)
    family = gguf_family(found.family, model)
    words, remarks = tokenizer_metadata(found, model.vocab_size)
    tensors = dict(_tensors(family, model, stored))
    kinds = {name: _kind(name, one, dtype) for name, one in tensors.items()}
    writer = Writer(f"{target}.part", family.name)
    matrices = kinds["token_embd.weight"]
    metadata: dict[str, Value] = {"general.type": "model", "general.name": folder.url.rstrip("/").rsplit("/", 1)[-1]}
    metadata |= {"general.file_type": FILE_TYPES[matrices], "general.quantization_version": gguf.GGML_QUANT_VERSION}
    _add(writer, {**metadata, **gguf_metadata(family, model), **words})
    factors = np.array(rope_factors(model), dtype=np.float32)
    if len(factors):
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for name, one in tensors.items():
        _announce(writer, name, one.shape, kinds[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if len(factors):
            writer.write_tensor_data(factors)
        for name, one in tensors.items():
            writer.write_tensor_data(_converted(_rows(folder, name, one, family, model), name, kinds[name]))
        writer.close()
        os.replace(f"{target}.part", target)
    except BaseException:
        writer.close()
        Path(f"{target}.part").unlink(missing_ok=True)
        raise
    return remarks


def _tensors(family: GgufFamily, model: ModelConfig, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Stored]]:
    """Yield llama.cpp's name and the place of each tensor of the file."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    for name, one in stored.items():
        base, _, kind = name.rpartition(".")
        if (base == "lm_head" and model.tied_head) or kind == "inv_freq":
            continue
        yield f"{names.get_name(base)}.{kind}", one
    if family.head == "own" and model.tied_head:
        yield "output.weight", stored["model.embed_tokens.weight"]


def _kind(name: str, one: Stored, dtype: str) -> Any:
    kind = DTYPES.get(dtype, STORED[one.dtype]) if len(one.shape) > 1 else Kind.F32
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if one.shape[-1] % block:
        problem = f"has blocks of {block}, and the rows of {name} have {one.shape[-1]} numbers"
        raise ConfigError(explain("dtype", dtype, problem, "use bf16"))
    return kind


def _add(writer: Any, metadata: Mapping[str, Value]) -> None:
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[types[type(value)]])


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    """Say which tensor follows; the package takes the shape of other types than fp32 and fp16 in bytes."""
    in_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
    plain = {Kind.F32: np.dtype(np.float32), Kind.F16: np.dtype(np.float16)}.get(kind)
    size = int(np.prod(in_bytes))
    writer.add_tensor_info(name, shape if plain else in_bytes, plain or np.dtype(np.uint8), size, raw_dtype=kind)


def _rows(folder: Folder, name: str, one: Stored, family: GgufFamily, model: ModelConfig) -> np.ndarray[Any, Any]:
    """Return a tensor as llama.cpp computes with it, fp32."""
    data = bytearray(folder.read_range(one.file, one.begin, one.begin + one.size_bytes))
    rows = torch.frombuffer(data, dtype=type_of(one.dtype)).float().view(one.shape)
    if model.norm_unit_offset and name.endswith("norm.weight"):
        rows = rows + 1.0  # such a norm scales by one plus its weight
    if family.pairs and re.search(r"\.attn_[qk]\.", name):  # neighbours are rotated together, not halves
        heads = rows.view(-1, 2, model.head_width // 2, *one.shape[1:])
        rows = heads.transpose(1, 2).reshape(one.shape)
    return rows.numpy()


def _converted(rows: np.ndarray[Any, Any], name: str, kind: Any) -> np.ndarray[Any, Any]:
    """Return rows in another type. Raises ConfigError if they are not finite there."""
    largest = float(np.abs(rows).max())
    if not largest <= LARGEST.get(kind, float(np.finfo(np.float32).max)):
        problem = f"has no room for all numbers of {name}"
        raise ConfigError(explain("dtype", kind.name, problem, "use bf16 or fp32"))
    return np.asarray(gguf.quantize(rows, kind))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", help="folder of an export")
    parser.add_argument("file", help="file to write")
    parser.add_argument("--dtype", default="", help="fp32, bf16, fp16 or q8_0; default: as stored")
    options = parser.parse_args()
    try:
        for remark in convert(options.export, options.file, options.dtype):
            print(f"note: {remark}")
    except (SpringtideError, OSError) as error:
        print(f"to_gguf: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.file}: {os.path.getsize(options.file) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
