"""How many guesses pay: as many as are likelier to be kept than what their time would give elsewhere.

One more token in a step takes b seconds, and the engine gives r tokens a second. The j-th guess of a request is kept
with all before it with probability a^j, a being its acceptance. So it is worth its time while a^j > b r. At the best
rate r no guess can be exchanged for a better one (Dinkelbach 1967), and r is that of the steps just done, so it gets
there. In a large batch a step is full, r is high, and guesses end by themselves; where none pays, there are none but
a trial now and then, and the plan says for how many rows (`StepPlan.num_undrafted`, in the trace `DraftUse`).

A model runs once more for each further guess, for all requests at once, in p seconds. So how often it runs is decided
for all n of them, by their mean acceptance a: the j-th pass is worth its time while a^j > (b + p / n) r.

The first guess of a step may cost more than a further one: a product of one row and one of two are different kernels.
So a step has guesses only if all of them together are likely to give more than their time would give elsewhere. What a
step without any takes is measured every PLAIN_AFTER steps, if guesses leave none.

It also computes what it does not guess, to keep up with the text: time that no number of guesses gives back. So it is
judged as a whole (`Payoff`): where the tokens that it adds would not take the target LEAST_WON more time than it takes
itself, prompts included, it is switched off (`StepPlan.keeps_up`), and for so long that all trials together cost at
most MOST_LOST of the time. What wins less than that may as well lose on another day: the host's work for guesses, and
the noise of a machine, are about as much.
Requests that it has not kept up with get no guesses any more, so a later trial is with new ones. Medusa heads and early
exit guess from what the target computed in the step before: they are judged alike, and a later trial is with all
requests, from its second step on.

b, p, r and the rest are measured on steps in which all requests decode, from the end of one to the end of the next:
what the host does for guesses counts. A machine stalls now and then: one step that
took fifty times as long as its like says nothing of what guesses cost. So times are medians, or means in which no time
counts for more than three times the median. Extends `Drafting._useful_drafts`, `schedule`, `update` and `_finish`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reference_impl.annexes.speculative.scheduling import Drafting
from reference_impl.interfaces import Request, StepOutput, StepPlan

NUM_SIZES = 16  # whose seconds are remembered
NUM_TIMES = 9  # of each: their median counts
PLAIN_AFTER = 48  # steps with guesses, until one has none
FORGOTTEN_AFTER = 128  # others, that a size was not among
STALL = 3.0  # times the median: what took longer is counted as so much
WEIGHT = 0.2  # of the newest step in the rate
MEMORY = 64  # steps that count in how often guesses are kept, and in what a model gives
LIKE_OTHERS = 32  # guesses that all requests together count for in what is expected of one
AT_FIRST = 0.8  # before any guess; those that are too many end soon
TRIAL_AFTER = 32  # steps without guesses, until a request has one tried again; twice as many if it is wrong
TRIAL_STEPS = 8  # with a model that guesses, before it is judged
COLD_STEPS = 4  # the first of a trial, in which a model takes longer: they do not count
ERRORS = 1  # standard errors of what guesses give, which are left out where it is judged: a few steps say little
OFF_STEPS = 256  # without it, until it is tried again, at least; twice as many if it loses again
MOST_LOST = 0.01  # of the time without it, in its trials
LEAST_WON = 0.05  # of the time without it, or it is switched off


@dataclass
class Times:
    """Seconds by a size, and what one more takes."""

    seconds: dict[int, float] = field(default_factory=dict)  # medians; the size seen last at the end
    _newest: dict[int, deque[float]] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # when a size was seen last
    _num: int = 0

    def add(self, size: int, seconds: float) -> None:
        self._num += 1
        self._seen[size] = self._num
        newest = self._newest.setdefault(size, deque(maxlen=NUM_TIMES))
        newest.append(seconds)
        self.seconds.pop(size, None)
        self.seconds[size] = statistics.median(newest)
        oldest = next(iter(self.seconds))
        if len(self.seconds) > NUM_SIZES or self._num - self._seen[oldest] > FORGOTTEN_AFTER:
            for found in (self.seconds, self._newest, self._seen):
                del found[oldest]

    def slope(self, beyond: int = -1) -> float | None:
        """Seconds for one more, of sizes beyond that one, or of all where fewer than two were seen; None until two
        were. A time that falls with size is noise."""
        larger = {size: seconds for size, seconds in self.seconds.items() if size > beyond}
        found = larger if len(larger) > 1 else self.seconds
        if len(found) < 2:
            return None
        return max(0.0, statistics.linear_regression([*found], [*found.values()]).slope)

    def jump(self, size: int, slope: float) -> float:
        """Seconds that the first one more than `size` takes, beyond the slope; 0 if that size was not seen."""
        larger = [seconds - slope * (other - size) for other, seconds in self.seconds.items() if other > size]
        if size not in self.seconds or not larger:
            return 0.0
        return max(0.0, statistics.fmean(larger) - self.seconds[size])


class Prices(NamedTuple):
    """Tokens that the engine gives in the time that something takes."""

    guess: float  # one more of the target's, in a step that has guesses
    first: float  # the first of a step, beyond that
    model: float  # a pass of a model, that guesses once for each request


@dataclass
class StepCosts:
    """Of steps in which all decode: the target's seconds by how many tokens it computes, a model's that guesses by how
    many guesses it makes one after another, and the rate at which tokens come."""

    target: Times = field(default_factory=Times)
    drafting: Times = field(default_factory=Times)
    _tokens: float = 0.0
    _time: float = 0.0

    def add(self, plan: StepPlan, num_given: int, seconds: float, drafting: float) -> None:
        """seconds: of the step, `drafting` of them of a model that guesses."""
        self.target.add(plan.num_tokens, seconds - drafting)
        if drafting:
            self.drafting.add(max(row.num_drafts for row in plan.rows), drafting)
        usual = self.target.seconds[plan.num_tokens] + drafting
        self._tokens += WEIGHT * (num_given - self._tokens)
        self._time += WEIGHT * (min(seconds, STALL * usual) - self._time)

    def of_guesses(self, num_rows: int, num: int) -> float:
        """Seconds that the target takes for so many guesses, in a step of so many rows."""
        slope = self.target.slope(num_rows)
        return 0.0 if slope is None or not num else slope * num + self.target.jump(num_rows, slope)

    def prices(self, num_rows: int) -> Prices | None:
        """In a step of so many rows; None until steps of two sizes were seen."""
        slope = self.target.slope(num_rows)
        if slope is None or self._time <= 0:
            return None
        rate = self._tokens / self._time
        return Prices(slope * rate, self.target.jump(num_rows, slope) * rate, (self.drafting.slope() or 0.0) * rate)


@dataclass
class Acceptance:
    """How often guesses are kept, of one request or of all. What is older counts less."""

    kept: float = 0.0
    missed: float = 0.0
    num_idle: int = 0  # steps since its last guess
    patience: int = TRIAL_AFTER  # of such steps before a trial

    def add(self, num_drafts: int, num_kept: int) -> None:
        # Without guesses, too: of what was long ago nothing follows.
        self.kept += num_kept - self.kept / MEMORY
        self.missed += (num_kept < num_drafts) - self.missed / MEMORY
        if not num_drafts:
            self.num_idle += 1
        else:
            if self.num_idle >= self.patience or num_kept:
                self.patience = TRIAL_AFTER if num_kept else 2 * self.patience
            self.num_idle = 0

    def chance(self, expected: float, weight: float) -> float:
        """That a guess is kept if those before it were. expected: what is assumed where little was seen, as if so many
        guesses had shown it."""
        return (self.kept + weight * expected) / (self.kept + self.missed + weight)


@dataclass
class Payoff:
    """Whether a model that guesses pays, of steps in which all decode. on: it is computed. num_steps: since it was
    switched on or off."""

    on: bool = True
    num_steps: int = 0
    patience: int = OFF_STEPS // 2  # steps without it, before a trial
    # The newest steps with it: tokens that guesses gave; tokens without them; seconds of a step without the model and
    # its guesses; seconds of these two, with the step's share of those for prompts.
    _steps: deque[tuple[int, int, float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def add(self, num_rows: int, num_given: int, seconds: float, spent: float, before: float = 0.0) -> None:
        """A step with it. num_rows, of which it guesses for some. spent: seconds of the step, its own for these and
        what the target takes for its guesses. before: of earlier steps, for their prompts."""
        spent = min(spent, 0.9 * seconds)  # the target's are of few steps at first, and may be far too many
        self.num_steps += 1
        if self.num_steps <= COLD_STEPS:
            return
        self._steps.append((num_given - num_rows, num_rows, seconds - spent, spent + before))
        if (self.num_steps - COLD_STEPS) % TRIAL_STEPS == 0 and self._lost(ERRORS) > -LEAST_WON:
            least = OFF_STEPS if self.num_steps > MEMORY else 2 * self.patience
            self.patience = max(least, math.ceil((COLD_STEPS + len(self._steps)) * self._lost() / MOST_LOST))
            self._switch(False)

    def _lost(self, errors: float = 0.0) -> float:
        """In a step, as a share of the time of one without it; below 0: won. errors: by how many standard errors
        guesses gave more than was seen."""
        gains, rows, plain, spent = zip(*self._steps, strict=True)
        num_steps, gain = len(gains), sum(gains) / len(gains)
        gain += errors * math.sqrt(sum((g - gain) ** 2 for g in gains)) / num_steps
        return _without_stalls(spent) / _without_stalls(plain) - gain * num_steps / sum(rows)

    def wait(self) -> None:
        """A step without it."""
        self.num_steps += 1
        if self.num_steps >= self.patience:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on, self.num_steps = on, 0
        self._steps.clear()


def _num_worth(price: float, chance: float, most: int) -> int:
    """The largest k up to `most` with chance^k > price, for chances below 1."""
    k = 0
    while k < most and chance ** (k + 1) > price:
        k += 1
    return k


def _without_stalls(seconds: Sequence[float]) -> float:
    """The mean; what took longer than STALL medians counts for so many."""
    most = STALL * sorted(seconds)[len(seconds) // 2]
    return sum(min(s, most) for s in seconds) / len(seconds)


class Adapting(Drafting):
    """num_drafts: the most that a row has. must_follow: what guesses has to compute all that it does not guess, too, to
    go on (if there is a model that does); otherwise the step before is enough."""

    def __init__(self, *core: Any, must_follow: bool = True, **options: Any):
        super().__init__(*core, **options)
        self.must_follow = must_follow
        self.costs = StepCosts()
        self.prices: Prices | None = None  # computed once a step, for all rows
        self._ended: float | None = None  # the step before, if this one is planned right behind it
        self._num_with_guesses = 0  # steps, since one without
        self._measures = False  # what a step takes without guesses: the one that is planned has none
        self._most = self.num_drafts  # guesses of a row, in the step that is planned
        self.acceptances: dict[str, Acceptance] = {}
        self.of_all = Acceptance()  # what is expected of a request before its first guess
        self._losing: set[str] = set()  # requests whose guesses would lose, in the step that is planned
        self.payoff = Payoff()  # of a model that guesses
        self._behind: set[str] = set()  # requests that it has not kept up with
        self._prompts: dict[str, float] = {}  # seconds that it took for a request's prompt
        self._prompt_seconds: deque[float] = deque(maxlen=NUM_TIMES)  # for a token, of the newest steps with prompts
        self._lengths: deque[int] = deque(maxlen=MEMORY)  # tokens that requests gave

    def schedule(self, now: float) -> StepPlan:
        self._losing.clear()
        self._measures = self._num_with_guesses >= PLAIN_AFTER
        self.has_guesses = self.payoff.on
        self._most = self._depth_that_pays() if self.payoff.on else 0
        plan = super().schedule(now)
        if self.payoff.on:
            num_undrafted = sum(row.request_id in self._losing and not row.num_drafts for row in plan.rows)
        else:
            num_undrafted = sum(row.samples for row in plan.rows)
        self._behind.difference_update(row.request_id for row in plan.rows if not row.start)
        if not self.payoff.on:
            self._behind.update(row.request_id for row in plan.rows)
        elif not self.must_follow:  # the step before a guess is enough
            self._behind.difference_update(row.request_id for row in plan.rows)
        keeps_up = not plan.rows or any(row.request_id not in self._behind for row in plan.rows)
        if num_undrafted or not keeps_up:
            return replace(plan, num_undrafted=num_undrafted, keeps_up=keeps_up)
        return plan

    def _useful_drafts(self, request: Request) -> int:
        most = super()._useful_drafts(request)
        if not most or self._measures:
            return 0
        if request.id in self._behind:
            self._losing.add(request.id)
            return 0
        num = min(most, self._num_that_pay(request))
        if not num and self.prices is not None:
            self._losing.add(request.id)
        return num

    def _num_that_pay(self, request: Request) -> int:
        if (
            self.prices is None
        ):  # a step without any, then one with one for each: from steps of one size nothing follows
            return min(1, len(self.costs.target.seconds))
        found = self.acceptances.get(request.id, self.of_all)
        k = _num_worth(self.prices.guess, self._chance(found), self._most)
        return k or int(found.num_idle >= found.patience)

    def _depth_that_pays(self) -> int:
        """A model guesses for all requests at once, so how often it runs is decided for all, by their mean chance; and
        whether there are any guesses, by what all are likely to give."""
        self.prices = self.costs.prices(len(self.running))
        if self.prices is None or not self.running:
            return self.num_drafts
        chances = [self._chance(self.acceptances.get(request.id, self.of_all)) for request in self.running]
        price, most = self.prices, self.num_drafts
        if price.model:
            most = _num_worth(price.guess + price.model / len(chances), sum(chances) / len(chances), most)
        numbers = [_num_worth(price.guess, chance, most) for chance in chances]
        gain = sum(sum(chance**j for j in range(1, k + 1)) for chance, k in zip(chances, numbers, strict=True))
        return most if gain > price.first + price.guess * sum(numbers) + price.model * max(numbers) else 0

    def _chance(self, found: Acceptance) -> float:
        return found.chance(self.of_all.chance(AT_FIRST, 2), LIKE_OTHERS)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        num_given = sum(map(len, output.tokens.values()))
        began = output.started_at if self._ended is None else self._ended
        for row in plan.rows if self.payoff.on else ():
            tokens = output.tokens.get(row.request_id, ())
            if row.request_id in self._requests and tokens:
                of_request = self.acceptances.setdefault(row.request_id, Acceptance())
                of_request.add(row.num_drafts, len(tokens) - 1)
                if row.num_drafts:
                    self.of_all.add(row.num_drafts, len(tokens) - 1)
        if plan.rows and all(row.num_tokens == 1 for row in plan.rows):
            if self.payoff.on or self.payoff.num_steps % TRIAL_STEPS == 0:  # few are enough of a model that is off
                self.costs.add(plan, num_given, output.finished_at - began, output.drafting)
            self._num_with_guesses = self._num_with_guesses + 1 if plan.num_tokens > len(plan.rows) else 0
            self._judge(plan, num_given, output.finished_at - began, output.drafting)
        elif self.payoff.on and output.drafting:
            self._prompt_seconds.append(output.drafting / plan.num_tokens)
            usual = min(self._prompt_seconds[-1], STALL * statistics.median(self._prompt_seconds))
            for row in plan.rows:
                if row.num_tokens > 1 and row.request_id in self._requests:  # not aborted meanwhile
                    self._prompts[row.request_id] = self._prompts.get(row.request_id, 0.0) + usual * row.num_tokens
        finished = super().update(plan, output)
        self._ended = output.finished_at if self.running else None
        return finished

    def _judge(self, plan: StepPlan, num_given: int, seconds: float, drafting: float) -> None:
        if not self.payoff.on:
            self.payoff.wait()
        elif drafting:
            rows = len(plan.rows)
            followed = sum(row.request_id not in self._behind for row in plan.rows) / rows
            spent = followed * drafting + self.costs.of_guesses(rows, plan.num_tokens - rows)
            self.payoff.add(rows, num_given, seconds, spent, num_given * self._prompt_seconds_of_a_token(plan) / rows)

    def _prompt_seconds_of_a_token(self, plan: StepPlan) -> float:
        """Of a model, for a token of each row: what its prompt took, over the tokens that its request may give."""
        usual = statistics.fmean(self._lengths) if self._lengths else math.inf
        names = [row.request_id for row in plan.rows if row.request_id in self._prompts]
        return sum(self._prompts[name] / min(usual, self._requests[name].sampling.max_tokens) for name in names)

    def _finish(self, request: Request, reason: str) -> None:
        super()._finish(request, reason)
        self.acceptances.pop(request.id, None)
        self._prompts.pop(request.id, None)
        self._lengths.append(max(1, request.num_tokens - request.num_prompt_tokens))
        self._behind.discard(request.id)
