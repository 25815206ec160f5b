"""The GPUs that kernels are compiled for, and the resources that a thread block may use.

Shared memory per block: NVIDIA CUDA C++ Programming Guide, table "Technical specifications per compute capability"
(opt-in maximum); AMD CDNA 3: 64 KiB of local data share per compute unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Architecture:
    """A GPU as the compiler sees it. name: Triton's name for it. has_matrix: whether Triton uses its matrix units (it
    does not use those of Turing); has_bf16, has_fp8: whether they multiply these dtypes. shared_bytes: the most shared
    memory that a thread block may have. multiprocessors: the number in the largest GPU of this kind.
    """

    name: str
    target: GPUTarget
    shared_bytes: int
    multiprocessors: int
    has_matrix: bool = True
    has_bf16: bool = True
    has_fp8: bool = False

    @property
    def is_large(self) -> bool:
        """Whether there is room for tiles of 128 by 128: Hopper and later."""
        return self.shared_bytes > 200 * 1024


def _nvidia(capability: int, shared_kib: int, multiprocessors: int, **has: bool) -> Architecture:
    target = GPUTarget("cuda", capability, 32)
    return Architecture(f"sm_{capability}", target, shared_kib * 1024, multiprocessors, **has)


ARCHITECTURES = {
    a.name: a
    for a in (
        _nvidia(75, 64, 40, has_matrix=False, has_bf16=False),  # T4
        _nvidia(80, 163, 108),  # A100
        _nvidia(86, 99, 84),  # A10, RTX 30
        _nvidia(89, 99, 142, has_fp8=True),  # L4, L40S, RTX 40
        _nvidia(90, 227, 132, has_fp8=True),  # H100, H200
        _nvidia(100, 227, 148, has_fp8=True),  # B200
        Architecture("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, 304, has_fp8=True),  # MI300X
    )
}
