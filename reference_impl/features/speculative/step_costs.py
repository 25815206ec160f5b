"""The time that steps take, by what they compute, and so the rate at which tokens would come with so many drafts.

Steps in which all requests decode are measured, from the end of one to the end of the next, so what the host does for
drafts counts. A step without drafts counts if the one before it had none either: right after a step with drafts the
host still has to append its tokens, and the caches hold the weights of the draft model.

A machine stalls now and then: one step that took fifty times as long as similar ones says nothing about what drafts
cost. So times are medians.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from reference_impl.interfaces import StepPlan

NUM_SIZES = 24  # whose seconds are remembered
NUM_TIMES = 9  # of each: their median counts
APART = 4  # sizes of a line span a quarter of the smallest: the slope of nearer ones is noise, and their rounding
NUM_SEEN = 2  # of each before they count: the first step of a kind may take ten times as long as the next
LASTING = 16  # steps of a number of rows, until what such steps take without drafts is measured
FORGOTTEN_AFTER = 1024  # steps in which a size was not seen
STALL = 3.0  # times the median: what took longer is counted as so much
WEIGHT = 0.2  # of the newest step in the rate


class Line(NamedTuple):
    """Seconds as a line over sizes. slope: 0 or more, since a time that falls with size is noise. size and seconds: a
    point of the line."""

    slope: float
    size: float
    seconds: float

    def at(self, size: int) -> float:
        """The seconds at a size; for a smaller size than the line's point no less than its share, since a line that
        noise has made too steep ends below zero."""
        share = size / max(1, size, self.size)
        return max(self.seconds * share, self.seconds + self.slope * (size - self.size))


@dataclass
class Times:
    """Seconds by size, with sizes rounded to an eighth. A size seen fewer than NUM_SEEN times does not count."""

    seconds: dict[int, float] = field(default_factory=dict)  # medians, of sizes seen often enough
    _newest: dict[int, deque[float]] = field(default_factory=dict)  # by size, the one seen last at the end
    _seen: dict[int, int] = field(default_factory=dict)  # when a size was seen last
    _lines: dict[int, Line | None] = field(default_factory=dict)  # those of `line`, since the newest time

    def add(self, size: int, seconds: float, now: int) -> None:
        """Adds a time. now: a count of steps, by which old sizes are forgotten."""
        size = _rounded(size)
        newest = self._newest.pop(size, None) or deque(maxlen=NUM_TIMES)
        newest.append(seconds)
        self._newest[size], self._seen[size] = newest, now
        if len(newest) >= NUM_SEEN:
            self.seconds[size] = statistics.median_low(newest)
        oldest = next(iter(self._newest))
        if len(self._newest) > NUM_SIZES or now - self._seen[oldest] > FORGOTTEN_AFTER:
            del self._newest[oldest], self._seen[oldest]
            self.seconds.pop(oldest, None)
        self._lines.clear()

    def line(self, beyond: int = -1) -> Line | None:
        """The line through sizes above `beyond`, or through all if fewer than two are; None if fewer than two are
        known, or they are not APART. A size counts as often as it was seen."""
        if beyond not in self._lines:
            self._lines[beyond] = self._fit(beyond)
        return self._lines[beyond]

    def _fit(self, beyond: int) -> Line | None:
        sizes = [size for size in self.seconds if size > beyond]
        if len(sizes) < 2:
            sizes = [*self.seconds]
        if len(sizes) < 2 or max(sizes) - min(sizes) < min(sizes) // APART:
            return None
        weights = [len(self._newest[size]) for size in sizes]
        weighted = [(size, self.seconds[size], weight) for size, weight in zip(sizes, weights, strict=True)]
        middle = sum(w * size for size, _, w in weighted) / sum(weights)
        seconds = sum(w * took for _, took, w in weighted) / sum(weights)
        spread = sum(w * (size - middle) ** 2 for size, _, w in weighted)
        rise = sum(w * (size - middle) * took for size, took, w in weighted)
        return Line(max(0.0, rise / spread), middle, seconds)

    def at(self, size: int, beyond: int = -1, slope: float = 0.0) -> float | None:
        """The seconds at a size: its median if it was seen NUM_TIMES times, otherwise what a line says (see `line`) or,
        if there is none, a line with this slope through a known size. None before any is known."""
        size = _rounded(size)
        if size in self.seconds and len(self._newest[size]) == NUM_TIMES:
            return self.seconds[size]
        line = self.line(beyond)
        if line is None:
            known = next(iter(self.seconds.items()), None)
            line = None if known is None else Line(slope, *known)
        return None if line is None else line.at(size)


@dataclass
class StepCosts:
    """The seconds that steps take. plain: the target's in steps without drafts, by the number of rows. alone: the same
    in steps in which the draft model was off; they are shorter, since it takes room in the processor's caches.
    verifying: the target's in steps with drafts, by the number of tokens. drafting: the draft model's, by how many
    tokens it drafts one after another."""

    plain: Times = field(default_factory=Times)
    alone: Times = field(default_factory=Times)
    verifying: Times = field(default_factory=Times)
    drafting: Times = field(default_factory=Times)
    all_decode: bool = False  # in the newest step
    num_steps: int = 0
    _after_plain: bool = False
    _num_rows: int = 0
    _num_like_it: int = 0  # steps with so many rows
    _tokens: float = 0.0
    _time: float = 0.0

    def add(self, plan: StepPlan, num_given: int, seconds: float, drafting: float = 0.0) -> bool:
        """Adds a step in which all decode. seconds: what it took, `drafting` of them by a draft model. Returns whether
        it showed what a step without drafts takes."""
        self.num_steps += 1
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        self._num_like_it = self._num_like_it + 1 if num_rows == self._num_rows else 1
        self._num_rows = num_rows
        is_plain = num_tokens == num_rows
        counts = self._after_plain or not is_plain
        if is_plain and counts:
            self.plain.add(num_rows, seconds - drafting, self.num_steps)
        elif not is_plain:
            self.verifying.add(num_tokens, seconds - drafting, self.num_steps)
        if drafting:
            self.drafting.add(max([row.num_drafts for row in plan.rows]), drafting, self.num_steps)
        if counts:
            self._tokens += WEIGHT * (num_given - self._tokens)
            usual = (self.plain if is_plain else self.verifying).seconds.get(_rounded(num_tokens))
            most = seconds if usual is None else STALL * (usual + drafting)
            self._time += WEIGHT * (min(seconds, most) - self._time)
        self.all_decode, self._after_plain = True, is_plain
        return is_plain and counts

    def add_alone(self, num_rows: int, seconds: float) -> None:
        """Adds a step in which all decode while a draft model is off."""
        self.num_steps += 1
        if self._after_plain:
            self.alone.add(num_rows, seconds, self.num_steps)
        self.all_decode = self._after_plain = True

    def interrupt(self) -> None:
        """Notes that the next step is not like the newest one: not all decoded in it, or a model was switched."""
        self.all_decode = self._after_plain = False

    def asks_for_plain(self, num_rows: int) -> bool:
        """Whether steps have had so many rows for a while, and none without drafts was seen with about as many, so that
        what such steps take is not known."""
        return self._num_like_it >= LASTING and not _covers(self.plain, num_rows)

    def has_plain_like(self, num_rows: int) -> bool:
        """Whether a step without drafts was seen with at least half as many rows: fewer say nothing about these."""
        return num_rows <= 2 * max(self.plain.seconds, default=0)

    def has_drafts_like(self, num_rows: int) -> bool:
        """Whether a step with drafts was seen with at least as many tokens as these rows: what is free for one request
        may not be for many."""
        return max(self.verifying.seconds, default=0) >= _rounded(num_rows)

    def plain_seconds(self, num_rows: int) -> float | None:
        """The target's seconds for a step without drafts; None until some were seen."""
        return self._without(self.plain, num_rows)

    def seconds_alone(self, num_rows: int) -> float | None:
        """The seconds of a step without drafts while the draft model is off; None until some were seen with about so
        many rows."""
        return self._without(self.alone, num_rows) if _covers(self.alone, num_rows) else None

    def _without(self, times: Times, num_rows: int) -> float | None:
        known = times.seconds.get(_rounded(num_rows))
        if known is not None:
            return known
        line = self.verifying.line()  # as if a row more were a draft token more
        return times.at(num_rows, slope=0.0 if line is None else line.slope)

    @property
    def rate(self) -> float:
        """The tokens per second in the newest steps."""
        return self._tokens / self._time if self._time > 0 else 0.0

    def slope(self, num_rows: int) -> float | None:
        """The target's seconds for one more draft token; None until steps with drafts and without were seen."""
        plain, line = self.plain_seconds(num_rows), self.verifying.line(num_rows)
        if plain is None or not self.verifying.seconds:
            return None
        if line is not None:
            return line.slope
        size, seconds = max(self.verifying.seconds.items())
        return max(0.0, (seconds - plain) / (size - num_rows)) if size > num_rows else 0.0

    def seconds(self, num_rows: int, num_drafts: int, depth: int) -> float:
        """The seconds of a step with so many rows, so many drafts in all, and at most `depth` for one row. To be called
        when steps with drafts and without were seen."""
        if num_drafts:
            found = self.verifying.at(num_rows + num_drafts, num_rows, self.slope(num_rows) or 0.0)
        else:
            found = self.plain_seconds(num_rows)
        assert found is not None
        return found + (self.drafting.at(depth) or 0.0)


def _rounded(size: int) -> int:
    """The size rounded down to one of eight in an octave: with 64 rows and drafts hardly two steps have the same number
    of tokens."""
    return size >> (shift := max(0, size.bit_length() - 4)) << shift


def _covers(times: Times, num_rows: int) -> bool:
    return any(num_rows <= 2 * size and size <= 2 * num_rows for size in times.seconds)
