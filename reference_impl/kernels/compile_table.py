"""What a kernel takes of each GPU: `python -m reference_impl.kernels.compile_table [--update | --all | --share S]`.

The table is `compiled.json`. A line is a launch (which kernel, types, constants, tile) on an architecture, under a key
that changes with anything that could change its machine code. Without options the command compiles nothing: it says
whether each line's key is the present one and its figures are in order. --share compiles a random part again and
compares, --all everything; --update compiles what has changed and writes the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from reference_impl.kernels.architectures import ARCHITECTURES, Architecture
from reference_impl.kernels.compilation import Resources, key, resources
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.launch import Launch, recording
from reference_impl.kernels.paged_decode import paged_decode

TABLE = Path(__file__).parent / "compiled.json"

Call = Callable[[torch.dtype], Any]  # a host function with tensors on the meta device, given the activations' dtype


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(function: Callable[..., Tensor], head_dim: int, group: int = 4, **options: Any) -> Call:
    """Rows of a Llama: 8 KV heads, blocks of 16. cache: dtype of the cache; tree: with ancestors."""
    rows, kv_heads, blocks, block_size = 64, 8, 1000, 16
    cache, tree = options.pop("cache", None), options.pop("tree", False)

    def call(dtype: torch.dtype) -> Tensor:
        given = dict(options)
        if cache is not None:
            scale = empty(blocks, block_size, kv_heads, dtype=torch.float32)
            given |= {"key_scale": scale, "value_scale": scale}
        if tree:
            given["ancestors"] = empty(rows, dtype=torch.int64)
        q = empty(rows, kv_heads * group, head_dim, dtype=dtype)
        stored = empty(blocks, block_size, kv_heads, head_dim, dtype=cache or dtype)
        table, lens = empty(rows, 256, dtype=torch.int32), empty(rows, dtype=torch.int32)
        between = 4096 if function is paged_decode else empty(rows + 1, dtype=torch.int32)
        places = (lens, between) if function is paged_decode else (between, lens)
        return function(q, stored, stored, table, *places, head_dim**-0.5, **given)

    return call


# Where Triton does not use the matrix units, kernels that multiply matrices spill thousands of bytes: there the twins
# serve, and only the calls of WITHOUT_MATRIX are compiled.
WITHOUT_MATRIX: dict[str, Call] = {}
CALLS: dict[str, Call] = {
    f"{function.__name__}, {name}": _attention(function, **options)
    for function in (flash_attention, paged_decode)
    for name, options in (
        ("head_dim 64", {"head_dim": 64}),
        ("head_dim 128", {"head_dim": 128}),
        ("head_dim 256", {"head_dim": 256}),
        ("MHA", {"head_dim": 64, "group": 1}),
        ("window", {"head_dim": 128, "window": 4096}),
        ("soft cap", {"head_dim": 256, "softcap": 50.0}),
        ("int8 cache", {"head_dim": 128, "cache": torch.int8}),
        ("fp8 cache", {"head_dim": 128, "cache": torch.float8_e4m3fn}),
    )
}
CALLS |= {
    "flash_attention, tree": _attention(flash_attention, 128, tree=True),
    "flash_attention, skip-softmax": _attention(flash_attention, 128, skip_threshold=1e-3),
}


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    launch: Launch
    architecture: Architecture

    @property
    def key(self) -> str:
        return key(self.launch, self.architecture)


def lines() -> Iterator[Line]:
    """Every launch on every architecture that has the types for it; fp16 where there is no bf16."""
    for architecture in ARCHITECTURES.values():
        dtype = torch.bfloat16 if architecture.has_bf16 else torch.float16
        for name, call in (CALLS if architecture.has_matrix else WITHOUT_MATRIX).items():
            if "fp8" in name and not architecture.has_fp8:
                continue
            with recording(architecture) as launches:
                call(dtype)
            for launch in launches:
                yield Line(f"{name}: {launch.name}, {architecture.name}", launch, architecture)


def compiled(line: Line) -> dict[str, Any]:
    found = dataclasses.asdict(resources(line.launch, line.architecture))
    return {"key": line.key, "triton": triton.__version__, **found, "options": dict(line.launch.options)}


def problems(line: Line, entry: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with a line of the table; empty where nothing is."""
    if entry is None:
        return ["is not in the table: run with --update"]
    found = Resources(**{field.name: entry[field.name] for field in dataclasses.fields(Resources)})
    wrong = found.problems(line.architecture)
    if "merge" not in line.launch.name and not found.matrix_instructions:
        wrong.append("uses no matrix instruction")
    if entry["triton"] == triton.__version__ and entry["key"] != line.key:
        wrong.append("has changed since it was compiled: run with --update")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    table = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    failures, again, names = 0, 0, set()
    for line in lines():
        names.add(line.name)
        if arguments.only not in line.name:
            continue
        old = table.get(line.name)
        fresh = old is None or old["key"] != line.key
        if (arguments.update and fresh) or arguments.all or random.random() < arguments.share:
            entry, again = compiled(line), again + 1
            if arguments.update:
                table[line.name] = entry
            elif entry != old:
                print(f"{line.name}: the table says {old}, the compiler {entry}")
                failures += 1
        for problem in problems(line, table.get(line.name)):
            print(f"{line.name}: {problem}")
            failures += 1
    if arguments.update:
        kept = {name: table[name] for name in sorted(names) if name in table}
        arguments.table.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(names)} lines, {again} compiled, {failures} problems")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
