"""An entry of a profile in words: what it is in the model, its work by the theory, and what its time goes to.

Three limits of this machine, measured in the same run: bytes / bandwidth, FLOPs / rate, and calls x the time of an
operator that does almost nothing. The largest of them governs; the share reached is that limit / the time it took.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from reference_impl.bench.profiling.events import Call, Entry
from reference_impl.bench.profiling.work import SMALL, Work
from reference_impl.theory.units import format_bytes, format_flops, format_seconds

# Beginnings of our kernels' names -> part of the model.
OURS = {
    "_fused_linear": "product", "_gemm_fp8": "product", "_gemm_w4a16": "product", "_gemm_w8a16": "product",
    "_gemm": "product", "_grouped_gemm": "experts", "_lora": "adapters",
    "_paged_decode": "attention", "_flash_attention": "attention", "_merge": "merge",
    "_rms_norm": "norm", "_act_and_mul": "gate", "_rotate_and_write": "rotary", "_quantize": "quantize",
    "_sample_tokens": "sampler",
}  # fmt: skip
_PRODUCT = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|linear|_int_mm|_weight_int\w+_mm\w*|_dyn_quant_matmul\w*)$|_linear_pointwise"
    r"|gemm|gemv|nvjet|cutlass|xmma|splitk(?!v)",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|^aten::(bmm|baddbmm|_softmax)$", re.IGNORECASE)
_GATHER = re.compile(r"^aten::(index_select|index|gather|take)$|index_select|gather", re.IGNORECASE)
_SCATTER = re.compile(r"^aten::(index_copy_|index_put_|_index_put_impl_|scatter\w*)$")
_MOVES = re.compile(r"^aten::(copy|cat|stack|clone|to|_to_copy|roll|fill|zero)_?$")  # of _EACH: what computes nothing
_WRITES = re.compile(r"^aten::(copy|fill|zero)_$")  # of those: the first input is their result, and not read
_EACH = re.compile(
    r"^aten::(add|sub|mul|div|neg|addcmul|silu|gelu|pow|rsqrt|sqrt|mean|sum|exp|roll|copy|cat|stack|clone|to|_to_copy|where|fill"
    r"|zero|masked_fill|_?fused_rms_norm|rms_norm|(native_)?layer_norm|_softmax|softmax|argmax|max|sort|cumsum|clamp)_?$|elementwise"
    r"|reduce_kernel|memcpy|memset|catarray",
    re.IGNORECASE,
)
_VIEW = re.compile(
    r"^aten::(narrow|view|slice|as_strided|select|transpose|t|reshape|_unsafe_view|expand|permute|unsqueeze|squeeze"
    r"|flatten|split|split_with_sizes|detach|alias|empty|empty_strided|empty_like|new_empty|resize_|resolve_conj"
    r"|item|_local_scalar_dense)$"
)
SAID = {
    "product": "a matrix product",
    "experts": "products of the experts that the tokens chose",
    "adapters": "products of the requests' adapters",
    "merge": "joins the parts of a context that was split",
    "quantize": "brings a product's input into FP8",
}
_REPLAYED = "submit"  # the part of the engine that launches a graph; launched one by one, kernels belong to the model's


@dataclass(frozen=True)
class Machine:
    """Limits measured in the same run. bandwidth: bytes per second of a copy, read and written; rate: FLOP/s of a
    product; smallest: seconds of an operator on one number; multiplies: the dtype of the rate."""

    bandwidth: float
    rate: float
    smallest: float
    multiplies: str = ""


@dataclass(frozen=True)
class Explanation:
    """What an entry is and needs, per step. flops and bytes None: the theory here has no count for them."""

    what: str
    calls: float
    seconds: float
    governs: str  # memory | arithmetic | overhead | unexplained
    flops: float | None = None
    bytes: float | None = None
    limit: float | None = None  # seconds, the largest of the three
    sentence: str = ""

    @property
    def share(self) -> float | None:
        """Share of the limit that is reached; above 1 where the data were in a cache."""
        return None if self.limit is None or not self.seconds else self.limit / self.seconds


def kind_of(entry: Entry) -> str:
    """An entry's kind: product, attention, gather, ..., by the name first and then by the part of the model; else
    ""."""
    for beginning, kind in OURS.items():
        if entry.name.startswith(beginning):
            return kind
    kinds = [
        ("product", _PRODUCT), ("attention", _ATTENTION), ("gather", _GATHER), ("scatter", _SCATTER), ("each", _EACH),
        ("view", _VIEW),
    ]  # fmt: skip
    if entry.label == "attention":  # its products are attention's
        del kinds[0]
    if entry.calls and all(call.hands_on for call in entry.calls):
        return "caller"
    return next((kind for kind, pattern in kinds if pattern.search(entry.name)), "")


def explain(entry: Entry, num_steps: int, work: Mapping[str, Work], machine: Machine) -> Explanation:
    """What an entry is, and which limit governs it."""
    calls, seconds, kind = len(entry.calls) / num_steps, entry.seconds / num_steps, kind_of(entry)
    place = f"{SAID.get(kind, 'an operator')}" + (f" ({entry.label})" if entry.label else "")
    found = _work(entry, kind, calls, num_steps, work)
    if found is None:
        sentence = "Not explained: the theory here has no count for it."
        if kind == "product" and entry.label == _REPLAYED:
            sentence = "Which product it is, a replayed graph does not say: run again with --graphs off."
        elif kind == "experts":
            sentence = "Not explained: how many weights it reads depends on which experts the tokens chose."
        return Explanation(place, calls, seconds, "unexplained", sentence=sentence)
    limits = {
        "memory": found.bytes / machine.bandwidth,
        "arithmetic": found.flops / machine.rate,
        "overhead": calls * machine.smallest,
    }
    governs = max(limits, key=lambda name: limits[name])
    return Explanation(
        found.what, calls, seconds, governs, found.flops, found.bytes, limits[governs],
        _sentence(governs, found, limits, calls, seconds),
    )  # fmt: skip


def _work(entry: Entry, kind: str, calls: float, num_steps: int, work: Mapping[str, Work]) -> Work | None:
    label = entry.label
    if kind == "product":
        products = [part for name, part in work.items() if name not in (*SMALL, "attention")]
        if label == _REPLAYED and calls == sum(part.calls for part in products):
            flops, moved = sum(p.flops for p in products), sum(p.bytes for p in products)
            return Work(flops, moved, round(calls), "all matrix products of the step, replayed from a graph")
        return work.get(label or "")
    if kind in SMALL:
        part = work[kind]
        return Work(part.flops * calls / part.calls, part.bytes * calls / part.calls, round(calls), part.what)
    if kind == "attention":
        return work["attention"]
    place = label or "step"
    if kind == "caller":
        return Work(0.0, 0.0, round(calls), f"calls other operators ({place}): its own time is that of the calls")
    if kind == "view":
        return Work(0.0, 0.0, round(calls), f"makes room, or a view of what is there ({place}): no number moves")
    if kind == "gather":
        moved = sum(map(_gathered, entry.calls)) / num_steps
        what = "copies keys and values out of their pages into one piece, for torch's attention"
        return Work(0.0, moved, round(calls), what if label == "attention" else f"looks rows up ({place})")
    if kind == "scatter":
        moved = sum(map(_scattered, entry.calls)) / num_steps
        return Work(0.0, moved, round(calls), f"writes rows into a table ({place})") if moved else None
    if kind == "each":
        numbers, moved = (sum(map(of, entry.calls)) / num_steps for of in (lambda call: call.numbers, _touched))
        if not moved:
            return None
        if _MOVES.search(entry.name):
            return Work(0.0, moved, round(calls), f"copies numbers, perhaps into another type ({place})")
        return Work(numbers, moved, round(calls), f"works on each number ({place})")
    return None


def _touched(call: Call) -> float:
    """Bytes of the inputs, and of a result like the largest of them if none of them is the result."""
    moved = [numbers * itemsize for numbers, itemsize in call.tensors]
    return sum(moved) + (0 if _WRITES.search(call.name) else max(moved, default=0))


def _scattered(call: Call) -> float:
    """Bytes of the rows, the last input, read and written; the table's other rows stay untouched."""
    return 2.0 * math.prod(call.tensors[-1]) if call.tensors else 0.0


def _gathered(call: Call) -> float:
    """Bytes read and written when rows of the first input are picked by the next one; 0 where shapes are not known."""
    table, *others = call.dims or ((),)
    picked = next((dims for dims in others if dims), ())
    return 2 * call.itemsizes[0] * math.prod(picked) * math.prod(table[1:]) if table and picked else 0.0


def _sentence(governs: str, work: Work, limits: Mapping[str, float], calls: float, seconds: float) -> str:
    limit, took = format_seconds(limits[governs]), format_seconds(seconds)
    share = limits[governs] / seconds if seconds else 0.0
    if governs == "overhead":
        text = f"Launch overhead governs: {calls:.0f} calls that do nothing would take {limit} of its {took}"
        moving = f", moving its {format_bytes(work.bytes)} {format_seconds(limits['memory'])}" if work.bytes else ""
        return f"{text}{moving}."
    about = f"moving {format_bytes(work.bytes)}" if governs == "memory" else f"computing {format_flops(work.flops)}"
    text = f"{governs.capitalize()} governs: {about} takes {limit} at this machine's speed; it took {took}"
    if share > 1:
        why = "its data lie in a cache" if governs == "memory" else "the product that was measured is slower"
        return f"{text}. That is faster than the limit: {why}."
    return f"{text}." if share >= 0.5 else f"{text}: well short of its limit: the operator itself could be better."
