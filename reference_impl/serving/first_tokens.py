"""Where the time to first token goes of an answer whose prompt was computed elsewhere.

    the router gives it away                                                              the router has the first token
      |-- queue --|-- prefill --|-- transfer --|-- rest ------------------------|-- first token --|
      until the     until its     until the      until a step begins that        that step, and what it takes
      prefill       prompt is     pages have     samples: waiting for a seat,    until the router has it
      engine        computed      come           reading the pages, what the
      begins        there                        prompt has besides

Engines say how long something took and never when: the router adds by its own clock, so clocks of other machines do not
matter, and what a message takes to the router belongs to the part that it ends. The parts add up to the TTFT as the
router sees it. What is pushed while the prompt is computed is in no part: only what is left of it is `transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, generate_latest

PARTS = ("queue", "prefill", "transfer", "rest", "first_token")
LAST = 500  # answers that are kept
SHARES = (50, 90, 99)
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


@dataclass
class _Waiting:
    """An answer without a token. computed_at: when the last of its prompts was, with the seconds that took; None while
    that is not known."""

    answer: str
    begun_at: float
    computed_at: float | None = None
    prefill: float = 0.0


def parts_of(
    begun_at: float, computed_at: float, now: float, *, prefill: float, rest: float, first: float
) -> dict[str, float]:
    """Seconds by part, which add up to now - begun_at. Moments are on the router's clock: begun_at, when it gave the
    request away; computed_at, when it heard that the prompt is computed; now, when it has the first token. prefill,
    rest, first: seconds as the engines measured them; none reaches beyond the moments before and after it."""
    before, parts = begun_at, []
    for moment in (computed_at - prefill, computed_at, now - first - rest, now - first, now):
        parts.append(max(before, min(moment, now)) - before)
        before += parts[-1]
    return dict(zip(PARTS, parts, strict=True))


class FirstTokens:
    """Of the answers of a router, by number of the stream. Moments: seconds on the router's clock."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._last: dict[str, dict[str, float] | None] = {}  # by answer, the latest at the end
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "inferlab:time_to_first_token_part_seconds",
            "Of answers whose prompt was computed elsewhere, by part",
            ["part"], buckets=_BUCKETS, registry=self._registry,
        )  # fmt: skip

    def begin(self, number: int, answer: str, now: float) -> None:
        """Its prompt is given to a prefill engine; for the second time, when one of its engines was lost."""
        begun_at = self._waiting[number].begun_at if number in self._waiting else now
        self._waiting[number] = _Waiting(answer, begun_at)

    def computed(self, number: int, prefill: float, now: float) -> None:
        """A prefill engine has computed one of its prompts in so many seconds. Of several the last one counts."""
        if (found := self._waiting.get(number)) is not None:
            found.computed_at, found.prefill = now, prefill

    def has(self, number: int, rest: float, first: float, now: float) -> None:
        """The first token is here. rest, first: what the decode engine says."""
        if (found := self._waiting.pop(number, None)) is None:
            return
        parts = None
        if found.computed_at is not None:  # otherwise no prefill engine came to the end: its time has no parts
            parts = parts_of(
                found.begun_at, found.computed_at, now, prefill=found.prefill, rest=rest, first=first
            )  # fmt: skip
            for part, seconds in parts.items():
                self._seconds.labels(part).observe(seconds)
        self._last[found.answer] = parts
        if len(self._last) > LAST:
            del self._last[next(iter(self._last))]

    def forget(self, number: int) -> None:
        """Its client has gone."""
        self._waiting.pop(number, None)

    def of(self, answer: str) -> dict[str, float] | None:
        """Seconds by part, of an answer or one of its samples, by its id; None for one that waits, that was not handed
        over or whose hand-over failed, or that is not kept any more."""
        whole = next((each for each in self._last if answer == each or answer.startswith((f"{each}-", f"{each}/"))), "")
        return self._last.get(whole)

    def summary(self) -> dict[str, dict[str, float] | None]:
        """Of the last answers by part, and in all ("ttft"): the mean and percentiles; None without any."""
        kept = [parts for parts in self._last.values() if parts is not None]
        each: dict[str, Sequence[float]] = {part: [parts[part] for parts in kept] for part in PARTS}
        each["ttft"] = [sum(parts.values()) for parts in kept]
        return {name: _summary(values) for name, values in each.items()}

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


def _summary(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = zip(SHARES, np.percentile(values, SHARES), strict=True)
    return {"mean": float(np.mean(values))} | {f"p{share}": float(value) for share, value in percentiles}
