"""A GGUF file, llama.cpp's format of models in one file: metadata, then a table of tensors, then their bytes.

    "GGUF", version uint32, number of tensors and of metadata uint64
    each metadata: name, type uint32, value        a string: its length uint64, bytes; an array: type, length, values
    each tensor: name, number of sizes uint32, sizes uint64 (innermost first), kind uint32, offset uint64
    padding to general.alignment; the tensors' bytes

All little-endian (docs/gguf.md of ggml-org/ggml, version 3; 2 differs in nothing that is read here). Everything read is
checked against the file's end and against limits first: a file may be cut off, or made to harm. As in llama.cpp's
reader, tensors lie in the table's order, one after the other, each from a multiple of the alignment on; so none lies in
another, and a wrong offset, shape or number of tensors is an error, not another weight.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.models.json_file import shown
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.gguf_blocks import BLOCKS

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = {  # of ggml.h: also those that are not read, for the error
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), **BLOCKS}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_DIMENSIONS, _DEEPEST = 4, 2
_MOST_ENTRIES = 1 << 24  # of all lists together: a vocabulary has some 10^5 tokens, and as many merges, types, scores
_LONGEST = 1 << 26  # bytes of a string: a tokenizer.json of a large vocabulary has 2^24


@dataclass(frozen=True)
class GgufTensor:
    """A tensor. shape: as torch has it, [out, in]. kind: "F32", "Q4_K", ... start, size: in bytes, in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


class GgufFile:
    """A GGUF file that was read. metadata: {name: number, string, or list of them}; tensors: {name: where it is}.
    Raises CheckpointError for a file that is cut off, damaged, or of a kind that is not read."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; expected a model in GGUF")
        if (size := path.stat().st_size) < 24:
            raise CheckpointError(f"{path}: expected a GGUF file, found {size} bytes: download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._read(_Cursor(data, path), size)

    def _read(self, at: _Cursor, size: int) -> None:
        if (magic := at.bytes(4)) != b"GGUF":
            raise CheckpointError(f"{self.path}: expected a GGUF file, which begins with GGUF, found {magic!r}")
        if (version := at.number("I")) not in (2, 3):
            raise CheckpointError(f"{self.path}: expected GGUF of version 2 or 3 (little-endian), found {version}")
        tensors, fields = at.number("Q"), at.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(at.count(fields, 12)):
            name = at.string()
            if name in self.metadata:
                raise at.error(f"metadata {shown(name)} came a second time")
            self.metadata[name] = at.value(at.number("I"))
        if (parts := self.metadata.get("split.count", 1)) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: split.count: expected a whole model in one file, found one of {shown(parts)} parts: "
                "join them with llama.cpp's llama-gguf-split --merge"
            )
        infos = [self._info(at) for _ in range(at.count(tensors, 24))]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise at.error(f"general.alignment: expected a power of two, found {alignment!r}")
        self.tensors: dict[str, GgufTensor] = {}
        base = end = _padded(at.place, alignment)
        for name, shape, kind, offset in infos:
            numbers, each = _SIZES[kind]
            start, nbytes = _padded(end, alignment), prod(shape) // numbers * each
            what = f"tensor {shown(name)}, {kind} {list(shape)}"
            if shape[-1] % numbers:
                raise at.error(f"{what}: expected rows of whole blocks of {numbers}")
            if base + offset != start:
                after = f"the end of the one before it, {end:,}, filled up to a multiple of {alignment}"
                raise at.error(f"{what}: expected its bytes from {start:,} on ({after}), found {base + offset:,}")
            if start + nbytes > size:
                raise at.error(f"{what}: expected {nbytes:,} bytes from {start:,} on; the file has {size:,} in all")
            if name in self.tensors:
                raise at.error(f"tensor {shown(name)} came a second time")
            self.tensors[name] = GgufTensor(name, shape, kind, start, nbytes)
            end = start + nbytes
        if size > _padded(end, alignment):
            raise at.error(
                f"expected the end of the last tensor, {end:,}, to be that of the file, which has {size:,} bytes"
            )

    def _info(self, at: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
        name, dimensions = at.string(), at.number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise at.error(f"tensor {shown(name)}: expected 1 to {_MOST_DIMENSIONS} sizes, found {dimensions}")
        shape = tuple(at.number("Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise at.error(f"tensor {shown(name)}: expected sizes of 1 or more, found {list(shape)}")
        kind, offset = at.number("I"), at.number("Q")
        known = _KINDS.get(kind, f"kind {kind}")
        if known not in _SIZES:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: expected {', '.join(_SIZES)}, found {known}: take a file of the "
                "model in one of these"
            )
        return name, shape, known, offset

    def raw(self, name: str) -> Tensor:
        """A copy of a tensor's own bytes: of floats their dtype [shape], of blocks uint8 [..., bytes of a row]."""
        tensor = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            data = bytearray(file.read(tensor.size))
        if len(data) != tensor.size:
            raise CheckpointError(f"{self.path}: tensor {name}: the file has become shorter: read it again")
        if (dtype := FLOATS.get(tensor.kind)) is not None:
            return torch.frombuffer(data, dtype=dtype).view(tensor.shape)
        return torch.frombuffer(data, dtype=torch.uint8).view(*tensor.shape[:-1], -1)


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


class _Cursor:
    """Reads from the front, never beyond the end, and no more entries of lists than `_MOST_ENTRIES`."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.place, self.entries = data, path, 0, 0

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: the file is damaged or cut off; download it again")

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.place:
            raise self.error(f"expected {count:,} more bytes at {self.place:,}, found {len(self.data) - self.place:,}")
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(form)))[0]

    def count(self, asked: int, least: int) -> int:
        """`asked`, if so many things of `least` bytes or more fit in the rest."""
        if asked * least > len(self.data) - self.place:
            raise self.error(f"expected {asked:,} entries at {self.place:,}, which do not fit in the rest of the file")
        self.entries += asked
        if self.entries > _MOST_ENTRIES:
            raise self.error(f"expected at most {_MOST_ENTRIES:,} entries of lists, found {self.entries:,} or more")
        return asked

    def string(self) -> str:
        if (length := self.number("Q")) > _LONGEST:
            raise self.error(f"expected a string of at most {_LONGEST:,} bytes at {self.place:,}, found {length:,}")
        found = self.bytes(length)
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise self.error(f"expected UTF-8 before {self.place:,}, found {found[:20]!r}") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth == _DEEPEST:
                raise self.error(
                    f"metadata at {self.place:,}: expected lists at most {_DEEPEST} deep, found a deeper one"
                )
            inner, length = self.number("I"), self.number("Q")
            if (form := _NUMBERS.get(inner)) is not None:
                self.count(length, struct.calcsize(form))
                return list(struct.unpack(f"<{length}{form}", self.bytes(length * struct.calcsize(form))))
            return [self.value(inner, depth + 1) for _ in range(self.count(length, 8))]
        if kind not in _NUMBERS:
            raise self.error(f"metadata at {self.place:,}: expected a type 0 to 12, found {kind}")
        return self.number(_NUMBERS[kind])
