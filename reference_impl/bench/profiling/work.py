"""What a step has to compute and to move, by the theory: FLOPs and bytes of each part of the model.

A product of n rows with a matrix [K, N]: 2 n K N FLOPs; the matrix as it is stored, and the rows in and out.
Attention of a row whose queries see s_1, s_2, ... positions: 4 x heads x head_dim x (s_1 + s_2 + ...) FLOPs; the keys
and values of what the row sees are read once, those of its new tokens written; the queries go in, the results out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reference_impl.bench.profiling.labels import products
from reference_impl.features.cpu.operators import HeadCopy
from reference_impl.interfaces import Row


@dataclass(frozen=True)
class Work:
    """Work of one part in one step. calls: how many times the part occurs in it."""

    flops: float
    bytes: float
    calls: int
    what: str


def step_work(model: Any, steps: Sequence[Sequence[Row]], kv_itemsize: float) -> dict[str, Work]:
    """{label: its work per step, on average}; each step is given by its rows. Experts are left out: how much of
    their weights a step reads depends on which ones its tokens choose."""
    c, size, count = model.config, model.dtype.itemsize, len(steps)
    tokens = sum(row.num_tokens for rows in steps for row in rows) / count
    found = {}
    for label, linears in products(model).items():
        if label != "experts":
            k, n = linears[0].in_features, linears[0].out_features
            flops = sum(2 * tokens * linear.in_features * linear.out_features for linear in linears)
            moved = sum(_stored(linear.params) + tokens * (k + n) * size for linear in linears)
            found[label] = Work(flops, moved, len(linears), f"{NAMES.get(label, label)}, [{k}, {n}]")
    sampling = sum(row.samples for rows in steps for row in rows) / count
    h, v = c.hidden_size, c.vocab_size
    head = (_stored(model.head.params) if isinstance(model.head, HeadCopy) else 0) or h * v * size
    found["lm_head"] = Work(2 * sampling * h * v, head + sampling * (h + v) * size, 1, f"the lm_head, [{h}, {v}]")
    found["attention"] = _attention(c, steps, size, kv_itemsize)
    for label, calls, numbers in (
        ("norm", 2 * c.num_layers + 1, 4 * tokens * h),
        ("gate", c.num_layers, 3 * tokens * c.intermediate_size),
        ("rotary", c.num_layers, tokens * (2 * c.num_heads + 4 * c.num_kv_heads) * c.head_dim),
        ("sampler", 1, sampling * v),
    ):
        found[label] = Work(numbers * calls, numbers * calls * size, calls, SMALL[label])
    return found


# Each number that goes in or comes out is moved once: a norm reads and writes the sum, too.
SMALL = {
    "norm": "the norm before a product, and the sum that goes into it",
    "gate": "the MLP's gate",
    "rotary": "norm and rotation of queries and keys, and the write of keys and values into the cache",
    "sampler": "chooses the tokens",
}


NAMES = {
    "qkv": "the product that makes queries, keys and values",
    "o": "the product after the attention",
    "gate_up": "the MLP's product for gate and up",
    "down": "the MLP's product down",
}


def _attention(c: Any, steps: Sequence[Sequence[Row]], size: int, kv_itemsize: float) -> Work:
    flops = moved = 0.0
    for window in c.layer_windows:
        for row in (row for rows in steps for row in rows):
            seen = [min(row.start + i + 1, window or row.start + i + 1) for i in range(row.num_tokens)]
            read = min(row.start + row.num_tokens, seen[-1] + row.num_tokens - 1)
            flops += 4 * c.num_heads * c.head_dim * sum(seen)
            moved += 2 * c.num_kv_heads * c.head_dim * kv_itemsize * (read + row.num_tokens)
            moved += 2 * c.num_heads * c.head_dim * size * row.num_tokens
    what = f"attention of {c.num_heads} heads over {c.num_kv_heads} KV heads of {c.head_dim}"
    return Work(flops / len(steps), moved / len(steps), c.num_layers, what)


def _stored(params: Mapping[str, Tensor]) -> float:
    """Bytes of parameters; a tensor in oneDNN's layout does not report them itself."""
    return sum(t.numel() * t.itemsize for t in params.values() if isinstance(t, Tensor))
