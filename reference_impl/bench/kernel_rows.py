"""What is computed per token, for the kernel bench: norm, gate, rotary embedding with the cache write, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference_impl.bench.kernel_work import Cast, Peer, Place, Work, bytes_of
from reference_impl.kernels import reference


def _torch(function: Callable[[], Any]) -> dict[str, Peer]:
    return {
        "torch": Peer(lambda: function),
        "torch.compile": Peer(lambda: torch.compile(function, dynamic=False), compiles=True),
    }


def norm(place: Place, rows: int, size: int) -> Work:
    """add_rms_norm; the check takes some rows of the normalised and of the sum."""
    from reference_impl.kernels.rms_norm import add_rms_norm

    rows, size = place.pick((rows, size), (5, 80))
    x, residual, weight = place.randn(rows, size), place.randn(rows, size), place.randn(size)
    some = slice(0, min(rows, 256))

    def expected(cast: Cast) -> Tensor:
        return torch.cat(reference.add_rms_norm(cast(x[some]), cast(residual[some]), cast(weight), 1e-6))

    return Work(
        ours=lambda: add_rms_norm(x, residual, weight, 1e-6),
        expected=expected,
        part=lambda found: torch.cat([t[some] for t in found]),
        moved=4 * bytes_of(x) + bytes_of(weight),
        peers=_torch(lambda: reference.add_rms_norm(x, residual, weight, 1e-6)),
    )


def gate(place: Place, rows: int, size: int) -> Work:
    from reference_impl.kernels.gates import silu_and_mul

    rows, size = place.pick((rows, size), (5, 72))
    x, some = place.randn(rows, 2 * size), slice(0, min(rows, 256))
    return Work(
        ours=lambda: silu_and_mul(x),
        expected=lambda cast: reference.silu_and_mul(cast(x[some])),
        part=lambda found: found[some],
        moved=1.5 * bytes_of(x),
        peers=_torch(lambda: reference.silu_and_mul(x)),
    )


def gate_to_fp8(place: Place, rows: int, size: int) -> Work:
    """The result of both is compared decoded: codes times scale."""
    from reference_impl.kernels.gates_fp8 import silu_and_mul_fp8

    rows, size = place.pick((rows, size), (5, 72))
    x, some = place.randn(rows, 2 * size), slice(0, min(rows, 256))

    def decoded(found: tuple[Tensor, Tensor]) -> Tensor:
        codes, scale = found
        return codes[some].float() * scale[some, None]

    def expected(cast: Cast) -> Tensor:
        y = cast(x[some])
        return reference.silu_and_mul(y) if y.dtype is torch.float64 else decoded(reference.silu_and_mul_fp8(y))

    return Work(
        ours=lambda: silu_and_mul_fp8(x),
        expected=expected,
        part=decoded,
        moved=bytes_of(x) + rows * size + 4 * rows,
        peers=_torch(lambda: reference.silu_and_mul_fp8(x)),
    )


def rotary(place: Place, tokens: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Work:
    """rotate_and_write with QK-norm, as in Qwen3; the check compares q and the contents of the cache."""
    from reference_impl.kernels.rotate_and_write import rotate_and_write

    tokens, heads, kv_heads, head_dim = place.pick((tokens, heads, kv_heads, head_dim), (7, 4, 2, 16))
    block_size, device = 16, place.device
    blocks = -(-tokens // block_size) + 1
    q, k, v = place.randn(tokens, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), 1)
    angle = torch.outer(
        torch.arange(tokens, device=device).float(), 1e4 ** -torch.linspace(0, 1, head_dim // 2).to(device)
    )
    cos = torch.cat((angle.cos(), angle.cos()), -1)[:, None]
    sin = torch.cat((-angle.sin(), angle.sin()), -1)[:, None]
    positions, slots = torch.arange(tokens, device=device), torch.randperm(blocks * block_size, device=device)[:tokens]
    cache = torch.zeros(2, blocks, block_size, kv_heads, head_dim, dtype=place.dtype, device=device)
    q_norm, k_norm = place.randn(head_dim), place.randn(head_dim)
    some = slice(0, min(tokens, 256))

    def looked_at(q: Tensor, cache: Tensor) -> Tensor:
        return torch.cat((q[some], *(t.flatten(0, 1)[slots[some]] for t in cache)), 1)

    def expected(cast: Cast) -> Tensor:
        own = cast(torch.zeros_like(cache))
        out = reference.rotate_and_write(
            cast(q[some]), cast(k[some]), cast(v[some]), positions[some], cast(cos), cast(sin),
            own[0], own[1], slots[some], cast(q_norm), cast(k_norm), 1e-6,
        )  # fmt: skip
        return looked_at(out, own)

    def ours() -> tuple[Tensor, Tensor]:
        return rotate_and_write(q, k, v, positions, cos, sin, cache[0], cache[1], slots, q_norm, k_norm, 1e-6), cache

    other = torch.zeros_like(cache)

    def separate() -> tuple[Tensor, Tensor]:
        """As the decoder does it in torch."""
        c, s = cos[positions], sin[positions]
        rotated_q = reference.rotate(reference.rms_norm(q, q_norm, 1e-6), c, s)
        other[0].flatten(0, 1).index_copy_(0, slots, reference.rotate(reference.rms_norm(k, k_norm, 1e-6), c, s))
        other[1].flatten(0, 1).index_copy_(0, slots, v)
        return rotated_q, other

    return Work(
        ours=ours,
        expected=expected,
        part=lambda found: looked_at(*found),
        moved=2 * bytes_of(q, k, v) + bytes_of(cos, sin),
        peers=_torch(separate),
    )


def sampling(place: Place, rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0) -> Work:
    """Every row drawn at temperature 0.8. The twin sorts; the kernel chooses exactly its tokens."""
    from reference_impl.kernels.sample_tokens import sample_tokens

    rows, vocab_size = place.pick((rows, vocab_size), (3, 300))
    logits = place.randn(rows, vocab_size, scale=3.0)

    def per_row(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=place.device)

    number = torch.arange(rows, device=place.device)
    given = (
        per_row(0.8), per_row(top_k, torch.int64), per_row(top_p), per_row(0.0),
        number * 7919, per_row(0, torch.int64), number + 100,
    )  # fmt: skip
    return Work(
        ours=lambda: sample_tokens(logits, *given),
        expected=lambda cast: reference.sample_tokens(logits, *given),
        moved=bytes_of(logits),
        cold=True,
        peers={"torch, with a sort": Peer(lambda: lambda: reference.sample_tokens(logits, *given))},
    )
