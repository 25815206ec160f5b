"""Compile a kernel for a GPU that this machine lacks, and read its use of registers and memory off the machine code.

Triton compiles on any machine, in a process without TRITON_INTERPRET. NVIDIA: registers and spills as `cuobjdump` of
Triton's wheel reports them, instructions as its `nvdisasm` prints them. AMD: the metadata in the assembly.
"""

from __future__ import annotations

import collections
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.launch import Launch, is_interpreted

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Modifiers of loads and stores that a source can ask for, as `tl.load` and `tl.store` spell them.
_HINT = re.compile(r"(?:ld|st)\.global[.\w]*?(\.c[agsv]|\.w[bt])\b|\b(evict_first|evict_last)\b")
# What the matrix units' instructions begin with: Ampere, Hopper, Hopper FP8, Blackwell, CDNA; integers.
_MATRIX = ("HMMA", "HGMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA", "v_mfma", "IMMA", "IGMMA")


@dataclass(frozen=True)
class Resources:
    """What a kernel uses. Per thread: registers, bytes spilled to memory. Per block: bytes of shared memory. Counts of
    instructions are those in the machine code.

    hints: what its loads and stores tell the caches (".cg", "evict_first"), read from the PTX; none on AMD. A copy to
    shared memory that the compiler sends ahead has lost the source's hint.
    """

    registers: int
    spilled: int
    shared_bytes: int
    instructions: int
    matrix_instructions: Mapping[str, int]
    hints: Sequence[str] = ()

    def problems(self, architecture: Architecture) -> list[str]:
        """What keeps a kernel from running well on this GPU; empty where it fits."""
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes per thread")
        if self.shared_bytes > architecture.shared_bytes:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, there are {architecture.shared_bytes}")
        return found


def key(launch: Launch, architecture: Architecture) -> str:
    """A hash of all that could change the machine code, 16 hexadecimal digits; the sources of helpers are included."""
    said = [
        _source_key(launch.kernel), sorted(launch.types.items()), sorted(launch.constants.items()), launch.aligned,
        sorted(launch.options.items()), architecture.name, triton.__version__,
    ]  # fmt: skip
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _source_key(kernel: Any) -> str:
    """Triton's own key, without the number of the line at which a function stands in its file."""
    functions = [kernel]
    for function in functions:
        if function.starting_line_number:
            function.starting_line_number, function.hash = 0, None
            functions += [
                each for each in vars(sys.modules[function.fn.__module__]).values() if isinstance(each, JITCallable)
            ]
    key: str = kernel.cache_key
    return key


def compile_for(launch: Launch, architecture: Architecture) -> Any:
    """Triton's CompiledKernel. Raises RuntimeError under the interpreter."""
    if is_interpreted():
        raise RuntimeError("expected a process without TRITON_INTERPRET: kernels defined under it cannot be compiled")
    names = launch.kernel.arg_names
    source = ASTSource(
        fn=launch.kernel,
        signature={name: launch.types.get(name, "constexpr") for name in names},
        constexprs={name: launch.constants[name] for name in names if name not in launch.types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    return triton.compile(source, target=architecture.target, options=dict(launch.options))


def resources(launch: Launch, architecture: Architecture) -> Resources:
    """Compiles, and reads what is used. Shared memory may exceed the GPU's: the driver would then refuse the launch."""
    compiled = compile_for(launch, architecture)
    if architecture.target.backend == "hip":
        return _of_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(_found(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    # A line of code: /*0070*/  @P0 HMMA.16816.F32 R4, ... ;
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    hints = sorted({hint for pair in _HINT.findall(compiled.asm["ptx"]) for hint in pair if hint})
    return Resources(registers, stack, compiled.metadata.shared, len(mnemonics), _matrix(mnemonics), hints)


def _of_amd(assembly: str, shared: int) -> Resources:
    registers = int(_found(r"\.vgpr_count:\s+(\d+)", assembly))
    spilled = int(_found(r"\.vgpr_spill_count:\s+(\d+)", assembly)) * 4
    mnemonics = re.findall(r"^\t((?:v|s|ds|global|buffer|flat)_\w+)", assembly, re.MULTILINE)
    return Resources(registers, spilled, shared, len(mnemonics), _matrix(mnemonics), [])


def _matrix(mnemonics: list[str]) -> dict[str, int]:
    names = (next((m for m in _MATRIX if mnemonic.startswith(m)), None) for mnemonic in mnemonics)
    return dict(sorted(collections.Counter(name for name in names if name).items()))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"expected {pattern} in the disassembler's output, which begins: {text[:200]!r}")
    return match[1]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
