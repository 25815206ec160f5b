"""Which layout of a model on so many GPUs: those that fit, what each gives, and why the first is first.

    found = plan("llama-3-70b", "H100", 8, ttft=0.5, tpot=0.05)
    found.best.tp, found.best.dp, found.best.tpot
    for layout in found.layouts: ...          # from best to worst
    print(found.why)

All tp x pp x dp with that product are tried, and for mixtures of experts each with ep (see `Layout`). Of layouts that
meet the asked TTFT and TPOT the one with most output tokens per second is first. If neither `batch` nor `rate` is
given, each layout gets as many requests at once as fit beside its weights and keep TPOT.

Model of a replica with b requests of P prompt and N output tokens, without queueing: a request's prompt is computed
alone (TTFT), in f seconds of the busiest stage; a decode step of all takes s seconds at the middle of an output, so
    b requests finish in T = b f + (N - 1) s seconds,   tokens/s = b N / T,   TPOT = (T - f) / (N - 1)
mfu and mbu are assumed shares of peak FLOP/s and bandwidth. `floor` is the textbook's at the limits of the hardware.
With the default shares tokens/s are 0.78 to 1.51 times 60 published figures of an engine at full load, 1.05 in the
geometric mean (`tests/theory/test_published_deployments.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from reference_impl.theory.choices import Choice, Load, divisors, name_of, sizes_of
from reference_impl.theory.collectives import all_reduce_break_even
from reference_impl.theory.hardware import Device
from reference_impl.theory.layout_costs import Layout, Setting
from reference_impl.theory.links import LINKS, Link, Topology
from reference_impl.theory.mixtures import Mixture, mixture_of
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.names import find_device, find_link, find_model

NODE = 8  # GPUs that share a link inside a node, unless said otherwise


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot be, in words that say by how much. floor: see `Choice`; None where the model is not divided
    so."""

    name: str
    why: str
    floor: float | None = None


@dataclass(frozen=True)
class Plan:
    """layouts: from best to worst, at least one. break_even: bytes at which one-shot and ring take the same time in a
    node; infinity for fewer than three ranks. notes: what to beware of."""

    setting: Setting
    prompt_tokens: int
    output_tokens: int
    layouts: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    why: str
    break_even: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        return self.layouts[0]


def plan(
    model: str | ModelShape,
    device: str | Device,
    num_devices: int,
    *,
    ttft: float | None = None,
    tpot: float | None = None,
    prompt_tokens: int = 1024,
    output_tokens: int = 256,
    batch: int | None = None,
    rate: float | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    weight_bits: float = 16,
    embedding_bits: float | None = None,
    kv_bits: float = 16,
    devices_per_node: int = NODE,
    between: str | Link = "InfiniBand NDR 400G",
    inside: str | Link | None = None,
    mixture: Mixture | None = None,
    mfu: float = 0.5,
    mbu: float = 0.7,
    utilization: float = 0.9,
    reserve: float = 0.0,
    weight_bytes: float | None = None,
    all_reduce_seconds: float | None = None,
) -> Plan:
    """The layouts of a model on GPUs, from best to worst.

    ttft, tpot: asked, in seconds. batch: requests at once, all replicas together; rate: requests per second. tp, pp,
    dp, ep: only layouts with these. inside: the link of a node, default the device's. mixture: of a shape that is not
    in the table. Weights of 8 bits are multiplied in 8 bits where the device can, all others in 16. Other arguments:
    see `Setting`. ValueError, in one line with the missing number and the nearest that works, for
    an unknown model, device or link, and where nothing fits or the model cannot be divided as asked.
    """
    shape = find_model(model) if isinstance(model, str) else model
    device = find_device(device) if isinstance(device, str) else device
    for name, value in (("ttft", ttft), ("tpot", tpot)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: expected more than 0 s, and a finite time, got {value:g}")
    for name, share in (("mfu", mfu), ("mbu", mbu), ("utilization", utilization)):
        if not 0 < share <= 1:
            raise ValueError(f"{name}: expected a share above 0 and at most 1, got {share:g}")
    _check(num_devices, prompt_tokens, output_tokens, batch, rate, devices_per_node)
    of_node = find_link(inside) if inside is not None else LINKS[device.link or device.host_link]
    where = Topology("plan", devices_per_node, of_node, find_link(between))
    setting = Setting(
        shape, mixture or mixture_of(shape), device, num_devices, where, _precision(device, weight_bits), weight_bits,
        embedding_bits, kv_bits / 8, mfu, mbu, utilization, reserve, weight_bytes, all_reduce_seconds,
    )  # fmt: skip
    asked = Load(prompt_tokens, output_tokens, batch, rate, ttft, tpot)
    fixed = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    found, rejected = [], []
    for sizes in sizes_of(setting, fixed):
        try:
            layout = Layout(setting, *sizes)
        except ValueError as error:
            rejected.append(Rejected(name_of(*sizes), str(error)))
            continue
        choice = asked.of(layout)
        if isinstance(choice, str):
            rejected.append(Rejected(name_of(*sizes), choice, layout.floor()))
        else:
            found.append(choice)
    if not found:
        raise ValueError(_nothing(setting, asked, fixed, rejected))
    found.sort(key=lambda c: (_miss(c, asked), -round(c.tokens_per_second, 3), c.ttft, c.pp, c.ep))
    group = min(num_devices, devices_per_node)
    meeting = all_reduce_break_even(group, of_node.alpha, of_node.per_direction) if group > 1 else float("inf")
    layouts, longest = tuple(found), shape.max_context
    notes = []
    if longest is not None and prompt_tokens + output_tokens > longest:
        notes.append(f"{shape.name} has a context of {longest:,} tokens; asked are {prompt_tokens + output_tokens:,}")
    return Plan(
        setting, prompt_tokens, output_tokens, layouts, tuple(rejected), _why(layouts, asked), float(meeting),
        tuple(notes),
    )  # fmt: skip


def _check(devices: int, prompt: int, output: int, batch: int | None, rate: float | None, per_node: int) -> None:
    given = {"num_devices": devices, "prompt_tokens": prompt, "output_tokens": output, "devices_per_node": per_node}
    given |= {} if batch is None else {"batch": batch}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate: expected more than 0 requests/s, and a finite number, got {rate:g}")
    if rate is not None and batch is not None:
        raise ValueError(f"rate: expected a rate or a batch, got both, {rate:g} and {batch}: leave one of them out")


def _precision(device: Device, weight_bits: float) -> str:
    """What matrices compute in: 8-bit weights in 8 bits where the device can, all else in 16."""
    eight = next((name for name in ("fp8", "int8") if weight_bits == 8 and name in device.dense_flops), None)
    return eight or ("bf16" if "bf16" in device.dense_flops else "fp16")


def _miss(choice: Choice, asked: Load) -> float:
    """By what factor the worst of the asked times is missed; 1 where none is."""
    pairs: Iterable[tuple[float, float | None]] = ((choice.ttft, asked.ttft), (choice.tpot, asked.tpot))
    return max([1.0, *(value / limit for value, limit in pairs if limit is not None)])


def _why(layouts: tuple[Choice, ...], asked: Load) -> str:
    """Why the first is first, in words."""
    best, others = layouts[0], layouts[1:]
    limits = {"memory": "as many as fit", "TPOT": "as many as keep TPOT", "rate": "for the rate", "asked": "as asked"}
    text = (
        f"{best.name}: {best.tokens_per_second:,.0f} output tokens/s with {best.batch} requests at once "
        f"({limits[best.limit]})"
    )
    if best.misses:
        return f"no layout keeps what is asked; {best.name} comes nearest: {', '.join(best.misses)}"
    if asked.ttft is not None or asked.tpot is not None:
        text += ", and it keeps what is asked"
    if not others:
        return f"{text}. It is the only layout that fits"
    second = others[0]
    if second.misses:
        return f"{text}. No other does: {second.name} has {', '.join(second.misses)}"
    ratio = best.tokens_per_second / second.tokens_per_second
    more = f"{ratio:.2f} times those of {second.name}" if ratio > 1.005 else f"as many as {second.name}"
    reasons = [f"messages take {best.communication:.0%} of a step, there {second.communication:.0%}"]
    if best.batch != second.batch:
        reasons.append(f"{best.batch} requests at once, there {second.batch}")
    return f"{text}. That is {more}: {'; '.join(reasons)}"


def _nothing(s: Setting, asked: Load, fixed: dict[str, int | None], rejected: list[Rejected]) -> str:
    """One line: what is missing, and the nearest that works."""
    given = {name: size for name, size in fixed.items() if size is not None}
    if not rejected:
        return _no_such(s, given)
    least = min(rejected, key=lambda each: (each.floor is None, each.floor or 0.0))
    text = f"nothing fits: {least.why}" if least.floor is None else f"nothing fits: {least.name}: {least.why}"
    if given or s.usable <= 0:
        return text
    if asked.rate is not None and (roomy := list(_roomy(s, asked))):
        could, best = max(((asked.could(layout), layout) for layout in roomy), key=lambda pair: pair[0])
        name = name_of(best.tp, best.pp, best.dp, best.ep)
        return (
            f"no layout gives {asked.rate:g} requests/s: {name}, the best, gives {could:.3g}. Nearest that works: "
            f"{s.num_devices * math.ceil(asked.rate / could)} GPUs"
        )
    more = (n for n in (*range(65), *range(72, 1025, 8)) if n > s.num_devices and n >= _least(s, asked))
    enough = next((n for n in more if any(_roomy(replace(s, num_devices=n), asked))), None)
    works = [] if enough is None else [f"{enough} GPUs"]
    lighter = [bits for bits in (8, 4) if bits < s.weight_bits and s.weight_bytes is None]
    works += [f"weights of {bits} bits" for bits in lighter if any(_roomy(replace(s, weight_bits=bits), asked))][:1]
    if asked.batch is not None and (most := _most(s, asked)):
        works.append(f"{most} requests at once")
    return f"{text}. Nearest that works: {', or '.join(works)}" if works else text


def _no_such(s: Setting, given: dict[str, int]) -> str:
    """Why no layout has the sizes that are given."""
    n = s.num_devices
    if s.mixture is None and given.get("ep", 1) != 1:
        return f"ep={given['ep']}: {s.shape.name} has no experts to divide; leave ep out"
    for name, size in given.items():
        if n % size and name != "ep":
            near = sorted(sorted(divisors(n), key=lambda k: (abs(k - size), k))[:2])
            return f"{name}={size} does not divide {n} GPUs; nearest that works: {' or '.join(map(str, near))}"

    def named(sizes: Iterable[int]) -> dict[str, int]:
        return {name: size for name, size in zip(("tp", "pp", "dp", "ep"), sizes, strict=True) if name in given}

    def distance(sizes: tuple[int, int, int, int]) -> tuple[float, int]:
        by_factor = sum(abs(math.log(size / given[name])) for name, size in named(sizes).items())
        return round(by_factor, 9), -sizes[0]

    found = min(sizes_of(s, {}), key=distance)
    nearest = named(found)
    asked, works = (" ".join(f"{name}={size}" for name, size in each.items()) for each in (given, nearest))
    rule = ", and ep 1, tp, or tp x dp where pp=1" if "ep" in given else ""
    return f"{asked}: tp x pp x dp has to be {n}, the number of GPUs{rule}; nearest that works: {works}"


def _least(s: Setting, asked: Load) -> float:
    """So many GPUs have at least the memory, however it is divided."""
    whole = Layout(replace(s, num_devices=1), 1, 1, 1, 1)
    cache = (asked.batch or 1) * asked.context * whole.parts[0].kv_values * s.kv_bytes
    return (whole.weights[0] + cache) / s.usable


def _most(s: Setting, asked: Load) -> int:
    """Requests at once for which there is room."""
    one = replace(asked, batch=None)
    return max((layout.dp * one.most(layout) for layout in _roomy(s, one)), default=0)


def _roomy(s: Setting, asked: Load) -> Iterator[Layout]:
    """The layouts whose memory suffices."""
    for sizes in sizes_of(s, {}):
        with suppress(ValueError):
            layout = Layout(s, *sizes)
            if asked.why_not(layout) is None:
                yield layout
