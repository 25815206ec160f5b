"""Which weights a model has: a hash that is the same in every process that loads them, whatever it makes of them.

For a checkpoint it covers the tensors as they are stored: names, dtypes, shapes, bytes. They are cut into chunks of a
fixed size, each is read once, and the chunks' hashes are combined in the order of the tensors' names: so the result
does not depend on which process hashes which chunk, nor on how a checkpoint is cut into files. Where they are
quantized it covers also what says how: the same codes are other weights in version 1 and 2 of GPTQ's format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.models.checkpoints import Checkpoint, is_gguf, quantization_of
from reference_impl.models.loader import CheckpointError, weight_files
from reference_impl.models.quantization.head import all_linears

CHUNK = 16 << 20  # bytes; another size gives other hashes
_THREADS = min(4, os.cpu_count() or 1)  # hashlib lets others run meanwhile; a disk is busy with four


class Stored(NamedTuple):
    """A tensor in a file. form: its dtype and shape, as the file says them."""

    name: str
    form: str
    file: Path
    start: int
    size: int


def stored_weights(path: Path, made: str) -> str:
    """See `Checkpoint.weights`."""
    tensors, said = stored_hash(stored_tensors(path)), how_stored(path)
    return hashlib.sha256(f"{tensors} {made}{said}".encode()).hexdigest()


def weights_of(model: Decoder) -> str:
    """The hash of the checkpoint that a model was loaded from, or else of its tensors in memory, 64 hexadecimal digits.
    Code that changes a model after it was loaded sets `checkpoint` to None."""
    checkpoint = getattr(model, "checkpoint", None)
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.weights
    total = hashlib.sha256()
    for name, tensor in tensors_of(model):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        total.update(hashlib.sha256(_bytes(tensor)).digest())
    return total.hexdigest()


def stored_hash(tensors: Iterable[Stored]) -> str:
    total, pieces = hashlib.sha256(), [(one, at) for one in sorted(tensors) for at in range(0, one.size or 1, CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for (one, at), digest in zip(pieces, pool.map(lambda piece: _chunk(*piece), pieces), strict=True):
            total.update(f"{one.name} {one.form} {at} ".encode() + digest)
    return total.hexdigest()


def how_stored(path: Path) -> str:
    """What says how a folder's tensors stand for weights: config.json's quantization_config, and what torchao writes of
    each tensor into the headers. "" where they are the weights, and for a GGUF file, which says it as their dtypes."""
    said = None if is_gguf(path) else quantization_of(path)
    if said is None:
        return ""
    headers = {entry for file in weight_files(path) for entry in _header(file)[1].get("__metadata__", {}).items()}
    of_tensors = sorted((name, text) for name, text in headers if name not in ("format", "tensor_names"))
    return json.dumps([said, of_tensors], sort_keys=True)


def stored_tensors(path: Path) -> list[Stored]:
    """The tensors of a Hugging Face folder or a GGUF file, from headers alone."""
    if is_gguf(path):
        from reference_impl.models.gguf_file import GgufFile

        found = GgufFile(path).tensors.values()
        return [Stored(one.name, f"{one.kind} {list(one.shape)}", path, one.start, one.size) for one in found]
    return [one for file in weight_files(path) for one in _in_safetensors(file)]


def _in_safetensors(file: Path) -> list[Stored]:
    length, table = _header(file)
    table.pop("__metadata__", None)
    try:
        return [
            Stored(name, f"{entry['dtype']} {entry['shape']}", file, 8 + length + begin, end - begin)
            for name, entry in table.items()
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise _incomplete(file, error) from None


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The length of a file's header, and the header."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            table = json.loads(opened.read(length))
        if not isinstance(table, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError) as error:
        raise _incomplete(file, error) from None
    return length, table


def _incomplete(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: not a complete safetensors file ({error}); download it again")


def _chunk(tensor: Stored, at: int) -> bytes:
    expected = min(CHUNK, tensor.size - at)
    with tensor.file.open("rb", buffering=0) as opened:
        opened.seek(tensor.start + at)
        data = opened.read(expected) if expected else b""
    if len(data) != expected:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: the file has become shorter: download it again")
    return hashlib.sha256(data).digest()


def tensors_of(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields all that products and norms read, by names that another process gives them, too."""
    yield "embedding", model.embedding
    if model.lm_head is not None and not model.lm_head.is_meta:
        yield "lm_head", model.lm_head
    yield from model.norms().items()
    for linear in all_linears(model):
        yield from ((f"{linear.name} {word}", tensor) for word, tensor in linear.params.items())
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        yield from ((f"{layer.index} {name}", tensor) for name, tensor in layer.norms().items())
        if layer.config.experts is not None:
            from reference_impl.models.moe import MixtureOfExperts

            if isinstance(layer.mlp, MixtureOfExperts):
                yield from ((f"{layer.index} {name}", tensor) for name, tensor in layer.mlp.tensors().items())


def _bytes(tensor: Tensor) -> Any:
    dense = tensor.to_dense() if tensor.is_mkldnn else tensor  # packed where the CPU multiplies packed weights faster
    return dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
