"""What a chain of kernels moves through device memory, fused and not; and what launching them costs.

Each kernel reads its inputs and writes its outputs once; caches are left out. What one kernel writes and a later one
reads is an intermediate. A chain of n kernels in a row has n - 1 (erratum E05.15). Fused, an intermediate is neither
written nor read, so it saves twice its bytes. One with other readers is still written: it saves its reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reference_impl.theory.units import Number


@dataclass(frozen=True)
class Kernel:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """A chain of kernels, in order. sizes: bytes of every tensor; kept: tensors that are needed after the chain."""

    kernels: tuple[Kernel, ...]
    sizes: Mapping[str, Number]
    kept: tuple[str, ...]

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Tensors written by one kernel of the chain and read by another, in order."""
        read = {name for kernel in self.kernels for name in kernel.reads}
        return tuple(name for kernel in self.kernels for name in kernel.writes if name in read)

    @property
    def fused(self) -> Kernel:
        """The chain as one kernel: reads the chain's inputs, writes what is kept."""
        made = {name for kernel in self.kernels for name in kernel.writes}
        given = dict.fromkeys(name for kernel in self.kernels for name in kernel.reads if name not in made)
        return Kernel("fused", tuple(given), self.kept)

    @property
    def bytes(self) -> Number:
        return sum(self._bytes(kernel) for kernel in self.kernels)

    @property
    def fused_bytes(self) -> Number:
        return self._bytes(self.fused)

    @property
    def saved(self) -> Number:
        return self.bytes - self.fused_bytes

    def _bytes(self, kernel: Kernel) -> Number:
        return sum(self.sizes[name] for name in (*kernel.reads, *kernel.writes))


def in_a_row(num_kernels: int, num_bytes: Number) -> Chain:
    """The simplest chain: each kernel reads one tensor and writes one of the same size."""
    names = [f"t{i}" for i in range(num_kernels + 1)]
    kernels = tuple(Kernel(f"kernel {i + 1}", (names[i],), (names[i + 1],)) for i in range(num_kernels))
    return Chain(kernels, dict.fromkeys(names, num_bytes), (names[-1],))


def add_norm_quantize(tokens: Number, hidden: Number, value_bytes: Number = 2) -> Chain:
    """What precedes a matrix product in FP8: residual add, RMSNorm, conversion with one fp32 scale per token.

    The sum is the residual stream: the next add needs it, so it is kept (erratum E05.12).
    """
    values = tokens * hidden * value_bytes
    return Chain(
        (
            Kernel("add", ("x", "residual"), ("sum",)),
            Kernel("norm", ("sum", "weight"), ("normed",)),
            Kernel("quantize", ("normed",), ("codes", "scale")),
        ),
        {"x": values, "residual": values, "sum": values, "weight": hidden * value_bytes, "normed": values,
         "codes": tokens * hidden, "scale": tokens * 4},
        ("sum", "codes", "scale"),
    )  # fmt: skip


def add_norm(tokens: Number, hidden: Number, value_bytes: Number = 2) -> Chain:
    """The chain of `add_norm_quantize` without the conversion."""
    whole = add_norm_quantize(tokens, hidden, value_bytes)
    return Chain(whole.kernels[:2], whole.sizes, ("sum", "normed"))


def gate_quantize(tokens: Number, intermediate: Number, value_bytes: Number = 2) -> Chain:
    """What precedes the MLP's second product: silu(gate), times up, conversion to FP8."""
    values = tokens * intermediate * value_bytes
    return Chain(
        (
            Kernel("silu", ("gate",), ("activated",)),
            Kernel("multiply", ("activated", "up"), ("product",)),
            Kernel("quantize", ("product",), ("codes", "scale")),
        ),
        {"gate": values, "up": values, "activated": values, "product": values, "codes": tokens * intermediate,
         "scale": tokens * 4},
        ("codes", "scale"),
    )  # fmt: skip


def rotate_and_write(
    tokens: Number, num_heads: Number, num_kv_heads: Number, head_dim: Number, value_bytes: Number = 2
) -> Chain:
    """Rotary embedding of queries and keys, then keys and values into their slots. cos and sin per token in fp32."""
    q, kv = tokens * num_heads * head_dim * value_bytes, tokens * num_kv_heads * head_dim * value_bytes
    table = tokens * head_dim * 4
    return Chain(
        (
            Kernel("rotate", ("q", "k", "cos and sin"), ("rotated q", "rotated k")),
            Kernel("write", ("rotated k", "v", "slots"), ("cached k", "cached v")),
        ),
        {"q": q, "rotated q": q, "k": kv, "rotated k": kv, "v": kv, "cached k": kv, "cached v": kv,
         "cos and sin": table, "slots": tokens * 8},
        ("rotated q", "cached k", "cached v"),
    )  # fmt: skip


def all_reduce_add_norm(tokens: Number, hidden: Number, value_bytes: Number = 2) -> Chain:
    """What follows a tensor-parallel layer, in one GPU's memory: partial sums reduced, residual added, normed.

    What crosses the links is the same either way and is not counted here.
    """
    values = tokens * hidden * value_bytes
    return Chain(
        (
            Kernel("all-reduce", ("partial",), ("reduced",)),
            Kernel("add", ("reduced", "residual"), ("sum",)),
            Kernel("norm", ("sum", "weight"), ("normed",)),
        ),
        {"partial": values, "reduced": values, "residual": values, "sum": values, "weight": hidden * value_bytes,
         "normed": values},
        ("sum", "normed"),
    )  # fmt: skip


def finish(durations: Sequence[float], launch: float, gap: float = 0.0) -> float:
    """Seconds until a stream of kernels is done: kernel i is issued after i + 1 launches and follows kernel i - 1.

    launch: the host's, per kernel; gap: between the end of a kernel and the start of the next, on the GPU. A CUDA
    graph is one launch for all: finish(durations, 0, gap) plus that launch.
    """
    end = -gap
    for i, duration in enumerate(durations):
        end = max((i + 1) * launch, end + gap) + duration
    return end


def working_share(work: Number, num_kernels: Number, gap: Number) -> Number:
    """Share of a step in which the GPU works: work / (work + kernels * gap), in seconds."""
    return work / (work + num_kernels * gap)
