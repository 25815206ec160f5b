"""What a layout gives under a load: requests at once, times, tokens per second; or by how much memory is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reference_impl.theory.layout_costs import Layout, Message, Setting
from reference_impl.theory.units import format_bytes


@dataclass(frozen=True)
class Choice:
    """A layout that fits, and what it gives. Times in seconds, sizes in bytes.

    batch: requests at once, all replicas together, and limit: what keeps it from being larger (asked, memory, TPOT,
    rate). floor: of a token of one stream. step: of a decode step of the batch; communication: share of it that
    messages take. ttft: of a prompt alone; tpot: with the prompts of other requests between. weights: of the busiest
    rank. kv_tokens: that all replicas can keep. messages: of a decode step of one replica. per_token: by link, bytes
    that the busiest rank sends for each output token. misses: asked times that it does not keep.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    batch: int
    limit: str
    floor: float
    ttft: float
    tpot: float
    step: float
    communication: float
    tokens_per_second: float
    weights: float
    kv_tokens: int
    messages: tuple[Message, ...]
    per_token: dict[str, float]
    misses: tuple[str, ...]

    @property
    def name(self) -> str:
        return name_of(self.tp, self.pp, self.dp, self.ep)


def name_of(tp: int, pp: int, dp: int, ep: int) -> str:
    """A layout in words: 'tp 4 x dp 2', 'one GPU'."""
    words = [f"{name} {size}" for name, size in (("tp", tp), ("pp", pp), ("dp", dp)) if size > 1]
    return " x ".join(words or ["one GPU"]) + (f", ep {ep}" if ep > 1 else "")


def sizes_of(setting: Setting, fixed: dict[str, int | None]) -> Iterator[tuple[int, int, int, int]]:
    """tp, pp, dp and ep with the product that there is of GPUs."""
    n = setting.num_devices
    for tp in divisors(n):
        for pp in divisors(n // tp):
            dp = n // tp // pp
            eps = {1} if setting.mixture is None else {1, tp, tp * dp if pp == 1 else tp}
            for ep in sorted(eps):
                sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
                if all(asked in (None, sizes[name]) for name, asked in fixed.items()):
                    yield tp, pp, dp, ep


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@dataclass(frozen=True)
class Load:
    """Requests and the times that they may take, in seconds; see `plan`."""

    prompt: int
    output: int
    batch: int | None
    rate: float | None
    ttft: float | None
    tpot: float | None

    @property
    def context(self) -> int:
        """Tokens in the cache at the end of a request: the last one is never fed back."""
        return self.prompt + self.output - 1

    def why_not(self, layout: Layout) -> str | None:
        """By how much memory does not suffice for the weights, one request, or those that are asked for."""
        s, heaviest = layout.setting, max(layout.weights)
        if s.usable <= 0:
            memory = format_bytes(s.utilization * s.device.capacity)
            return f"{format_bytes(s.reserve)} are reserved on each GPU, and {memory} of it may be used"
        if heaviest >= s.usable:
            return (
                f"{format_bytes(heaviest)} of weights on a GPU with {format_bytes(s.usable)} to use: "
                f"{format_bytes(heaviest - s.usable)} missing"
            )
        asked = -(-(self.batch or 1) // layout.dp)
        if (missing := asked * self.context - layout.kv_tokens(asked)) > 0:
            whose = "one request" if asked == 1 else f"{asked} requests in a replica"
            return f"room for {asked * self.context - missing:,} tokens of cache, {missing:,} short of {whose}"
        return None

    def most(self, layout: Layout) -> int:
        """Requests of a replica for which there is room."""
        return _last(lambda b: layout.kv_tokens(b) >= b * self.context)

    def could(self, layout: Layout) -> float:
        """Requests per second, all replicas full."""
        return layout.dp * self.finished(layout, self.most(layout))

    def of(self, layout: Layout) -> Choice | str:
        """What the layout gives, or why it cannot."""
        if (why := self.why_not(layout)) is not None:
            return why
        if self.batch is not None:
            return self._choice(layout, -(-self.batch // layout.dp), "asked")
        most = self.most(layout)
        if self.rate is not None:
            each = self.rate / layout.dp
            batch = 1 + _last(lambda b: b <= most and self.finished(layout, b) < each)
            if batch > most:
                return f"{self.rate:g} requests/s where {most * layout.dp} at once give {self.could(layout):.3g}"
            return self._choice(layout, batch, "rate")
        if self.tpot is None:
            return self._choice(layout, most, "memory")
        kept = _last(lambda b: b <= most and self.times(layout, b)[1] <= (self.tpot or 0))
        return self._choice(layout, max(1, kept), "memory" if kept == most else "TPOT")

    def _choice(self, layout: Layout, batch: int, limit: str) -> Choice:
        step, tpot, seconds = self.times(layout, batch)
        ttft = sum(layout.seconds(1, self.prompt, 0))
        rows = -(-batch // min(layout.pp, batch))
        messages = tuple(layout.messages(rows, 1))
        inside, between = layout.setting.where.inside.name, layout.setting.where.between.name
        per_token = {
            link: max(
                sum(m.calls * getattr(m, kind) for m in messages if m.stage == stage) / rows
                for stage in range(layout.pp)
            )
            for link, kind in ((inside, "inside"), (between, "between"))
        }
        total = sum(layout.seconds(rows, 1, self._middle))
        requests = batch * layout.dp if self.batch is None else self.batch
        return Choice(
            layout.tp, layout.pp, layout.dp, layout.ep, requests, limit, layout.floor(), ttft, tpot, step,
            sum(m.calls * m.seconds for m in messages) / total, requests * self.output / seconds,
            max(layout.weights), layout.kv_tokens() * layout.dp, messages,
            {link: size for link, size in per_token.items() if size},
            tuple(
                f"{name} {value * 1e3:.3g} ms where {asked * 1e3:.3g} are asked"
                for name, value, asked in (("TTFT", ttft, self.ttft), ("TPOT", tpot, self.tpot))
                if asked is not None and value > asked
            ),
        )  # fmt: skip

    @property
    def _middle(self) -> float:
        """Cached tokens before the token in the middle of an output."""
        return self.prompt + max(1.0, self.output / 2) - 1

    def times(self, layout: Layout, batch: int) -> tuple[float, float, float]:
        """A decode step, TPOT, and the time in which `batch` requests of a replica finish."""
        in_flight = min(layout.pp, batch)
        stages = layout.seconds(-(-batch // in_flight), 1, self._middle)
        step = max(sum(stages), in_flight * max(stages))
        busy = max(layout.seconds(1, self.prompt, 0))
        seconds = batch * busy + (self.output - 1) * step
        if batch == 1:
            seconds = sum(layout.seconds(1, self.prompt, 0)) + (self.output - 1) * step
        others = (batch - 1) * busy / (self.output - 1) if self.output > 1 else 0.0
        return step, step + others, seconds

    def finished(self, layout: Layout, batch: int) -> float:
        """Requests per second of a replica."""
        return batch / self.times(layout, batch)[2]


def _last(holds: Callable[[int], bool]) -> int:
    """The largest number up to which `holds` is true, which it is up to some number; 0 where not even for 1."""
    low, high = 0, 1
    while high < 1 << 24 and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
