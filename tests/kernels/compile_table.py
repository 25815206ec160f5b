"""What a kernel uses of each GPU: `python -m tests.kernels.compile_table [--update | --all | --share S]`.

The table is `reference_impl/kernels/compiled.json`. A line is a launch (which kernel, types, constants, tile) on an
architecture, under a key that changes with anything that could change its machine code. Without options the command
compiles nothing: it checks that each line's key is up to date and that its figures fit the GPU. --share compiles a
random part again and compares, --all everything; --update compiles what has changed and writes the table. Another
version of Triton makes other machine code, so its figures are only checked against the GPU, and not compared with a
line that another version made.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton

import reference_impl
from reference_impl.kernels.architectures import ARCHITECTURES, Architecture
from reference_impl.kernels.compilation import Resources, key, resources
from reference_impl.kernels.launch import Launch, recording
from tests.kernels.calls import CALLS

TABLE = Path(reference_impl.__file__).parent / "kernels/compiled.json"


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    launch: Launch
    architecture: Architecture

    @property
    def key(self) -> str:
        return key(self.launch, self.architecture)


def lines() -> Iterator[Line]:
    """Every launch on every architecture that has the types for it; fp16 where there is no bf16.

    Where Triton does not use the matrix units, kernels that multiply matrices spill thousands of bytes: the twins in
    torch are used there, and these kernels are not compiled.
    """
    for architecture in ARCHITECTURES.values():
        dtype = torch.bfloat16 if architecture.has_bf16 else torch.float16
        for name, call in CALLS.items():
            if "fp8" in name and not architecture.has_fp8:
                continue
            with recording(architecture) as launches:
                call(dtype)
            for launch in launches:
                if architecture.has_matrix or not launch.multiplies:
                    yield Line(f"{name}: {launch.name}, {architecture.name}", launch, architecture)


def compiled(line: Line) -> dict[str, Any]:
    found = dataclasses.asdict(resources(line.launch, line.architecture))
    return {"key": line.key, "triton": triton.__version__, **found, "options": dict(line.launch.options)}


def problems(line: Line, entry: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with a line of the table; empty if nothing is."""
    if entry is None:
        return ["is not in the table: run with --update"]
    found = Resources(**{field.name: entry[field.name] for field in dataclasses.fields(Resources)})
    wrong = found.problems(line.architecture)
    if line.launch.multiplies and not found.matrix_instructions:
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
        old = judged = table.get(line.name)
        fresh = old is None or old["key"] != line.key
        if (arguments.update and fresh) or arguments.all or random.random() < arguments.share:
            entry, again = compiled(line), again + 1
            if arguments.update:
                table[line.name] = judged = entry
            elif old is not None and old["triton"] != triton.__version__:
                judged = entry
            elif entry != old:
                print(f"{line.name}: the table says {old}, the compiler {entry}")
                failures += 1
        for problem in problems(line, judged):
            print(f"{line.name}: {problem}")
            failures += 1
    if arguments.update:
        kept = {name: table[name] for name in sorted(names) if name in table}
        arguments.table.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(names)} lines, {again} compiled, {failures} problems")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
