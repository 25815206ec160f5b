"""How many guesses pay: as many as are likelier to be kept than what their time would give elsewhere.

One more token in a step takes b seconds, and the engine gives r tokens a second. The j-th guess of a request is kept
with all before it with probability a^j, a being its acceptance. So it is worth its time while a^j > b r. At the best
rate r no guess can be exchanged for a better one (Dinkelbach 1967), and r is that of the steps just done, so it gets
there. In a large batch a step is full, r is high, and guesses end by themselves; where none pays, there are none but
a trial now and then, and the plan says for how many rows (`StepPlan.num_undrafted`, in the trace `DraftUse`).

A model that guesses also computes what it does not guess, to keep up with the text: time that no number of guesses
gives back. So it is judged as a whole (`Payoff`): where the tokens that it adds would take the target less time than it
takes itself, it is switched off (`StepPlan.keeps_up`). Requests that it has not kept up with get no guesses any more,
so a later trial is with new ones. Medusa heads and early exit guess from what the target has computed, and need not
keep up: they are judged alike, and a later trial is with all requests.

b, r and the rest are measured on steps in which all requests decode. Extends `Drafting._useful_drafts`, `schedule`,
`update` and `_finish`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from reference_impl.annexes.speculative.scheduling import Drafting
from reference_impl.interfaces import Request, StepOutput, StepPlan

NUM_POINTS = 16  # step sizes whose seconds are remembered
WEIGHT = 0.2  # of the newest step in what is remembered
MEMORY = 64  # steps that count in how often guesses are kept, and in what a model gives
LIKE_OTHERS = 32  # guesses that all requests together count for in what is expected of one
AT_FIRST = 0.8  # before any guess; those that are too many end soon
TRIAL_AFTER = 32  # steps without guesses, until a request has one tried again; twice as many if it is wrong
TRIAL_STEPS = 16  # with a model that guesses, before it is judged
OFF_STEPS = 256  # without it, until it is tried again; twice as many if it loses again


@dataclass
class StepCosts:
    """Of steps in which all decode: seconds by how many tokens they compute, and the rate at which tokens come."""

    seconds: dict[int, float] = field(default_factory=dict)  # the size seen last at the end
    _tokens: float = 0.0
    _time: float = 0.0

    def add(self, num_computed: int, num_given: int, seconds: float) -> None:
        before = self.seconds.pop(num_computed, seconds)
        self.seconds[num_computed] = before + WEIGHT * (seconds - before)
        if len(self.seconds) > NUM_POINTS:
            del self.seconds[next(iter(self.seconds))]
        self._tokens += WEIGHT * (num_given - self._tokens)
        self._time += WEIGHT * (seconds - self._time)

    def price(self) -> float | None:
        """Tokens that the engine gives in the time that one more token takes in a step; None until steps of two sizes
        were seen."""
        slope = self.seconds_per_token()
        return None if slope is None or self._time <= 0 else slope * self._tokens / self._time

    def seconds_per_token(self) -> float | None:
        """Of one more token in a step; None until steps of two sizes were seen."""
        if len(self.seconds) < 2:
            return None
        return max(0.0, statistics.linear_regression([*self.seconds], [*self.seconds.values()]).slope)


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
        elif self.num_idle:
            self.num_idle, self.patience = 0, TRIAL_AFTER if num_kept else 2 * self.patience

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
    target: StepCosts = field(default_factory=StepCosts)  # of the target alone
    # Means over the last MEMORY steps: tokens that guesses gave, and their squares; tokens without them; seconds of a
    # step without the model and its guesses; seconds of these two.
    _means: tuple[float, ...] = (0.0,) * 5

    def add(self, num_rows: int, num_computed: int, num_given: int, seconds: float, drafting: float) -> None:
        """A step with it. num_rows, of which it guesses for some. drafting: seconds of the step, its own for these."""
        self.target.add(num_computed, num_given, seconds - drafting)
        spent = drafting + (self.target.seconds_per_token() or 0.0) * (num_computed - num_rows)
        self.num_steps += 1
        gain, num_seen = num_given - num_rows, min(self.num_steps, MEMORY)
        new = gain, gain**2, num_rows, seconds - spent, spent
        self._means = tuple([mean + (x - mean) / num_seen for x, mean in zip(new, self._means, strict=True)])
        if num_seen >= TRIAL_STEPS and self._loses(num_seen):
            self.patience = OFF_STEPS if self.num_steps > 4 * TRIAL_STEPS else 2 * self.patience
            self._switch(False)

    def _loses(self, num_seen: int) -> bool:
        """Also if guesses gave more, by a standard error, than was seen: a few steps say little."""
        gain, square, rows, plain, spent = self._means
        gain += math.sqrt(max(0.0, square - gain**2) / num_seen)
        return gain * plain < spent * rows

    def wait(self) -> None:
        """A step without it."""
        self.num_steps += 1
        if self.num_steps >= self.patience:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on, self.num_steps = on, 0
        self._means = (0.0,) * 5


class Adapting(Drafting):
    """num_drafts: the most that a row has. must_follow: what guesses has to compute what it does not guess, too, to go
    on (if there is a model that does)."""

    def __init__(self, *core: Any, must_follow: bool = True, **options: Any):
        super().__init__(*core, **options)
        self.must_follow = must_follow
        self.costs = StepCosts()
        self.price: float | None = None  # as of `StepCosts`; computed once a step, for all rows
        self.acceptances: dict[str, Acceptance] = {}
        self.of_all = Acceptance()  # what is expected of a request before its first guess
        self._losing: set[str] = set()  # requests whose guesses would lose, in the step that is planned
        self.payoff = Payoff()  # of a model that guesses
        self._behind: set[str] = set()  # requests that it has not kept up with

    def schedule(self, now: float) -> StepPlan:
        self._losing.clear()
        plan = super().schedule(now)
        num_undrafted = sum(row.request_id in self._losing and not row.num_drafts for row in plan.rows)
        self._behind.difference_update(row.request_id for row in plan.rows if not row.start)
        if self.must_follow and not self.payoff.on:
            self._behind.update(row.request_id for row in plan.rows)
        keeps_up = not plan.rows or any(row.request_id not in self._behind for row in plan.rows)
        if num_undrafted or not keeps_up:
            return replace(plan, num_undrafted=num_undrafted, keeps_up=keeps_up)
        return plan

    def _useful_drafts(self, request: Request) -> int:
        most = super()._useful_drafts(request)
        if most and (not self.payoff.on or request.id in self._behind):
            self._losing.add(request.id)
            return 0
        num = min(most, self._num_that_pay(request)) if most else 0
        if most and not num and self.price is not None:
            self._losing.add(request.id)
        return num

    def _num_that_pay(self, request: Request) -> int:
        found, price = self.acceptances.get(request.id, self.of_all), self.price
        if price is None:  # a step without any, then one with one for each: from steps of one size nothing follows
            return min(1, len(self.costs.seconds))
        k, chance = 0, found.chance(self.of_all.chance(AT_FIRST, 2), LIKE_OTHERS)
        while k < self.num_drafts and chance ** (k + 1) > price:
            k += 1
        return k or int(found.num_idle >= found.patience)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        num_given = 0
        for row in plan.rows:
            tokens = output.tokens.get(row.request_id, ())
            num_given += len(tokens)
            if row.request_id in self._requests and tokens:
                of_request = self.acceptances.setdefault(row.request_id, Acceptance())
                of_request.add(row.num_drafts, len(tokens) - 1)
                if row.num_drafts:
                    self.of_all.add(row.num_drafts, len(tokens) - 1)
        if plan.rows and all(row.num_tokens == 1 for row in plan.rows):
            self.costs.add(plan.num_tokens, num_given, output.finished_at - output.started_at)
            self.price = self.costs.price()
            self._judge(plan, num_given, output)
        return super().update(plan, output)

    def _judge(self, plan: StepPlan, num_given: int, output: StepOutput) -> None:
        if not self.payoff.on:
            self.payoff.wait()
        elif output.drafting:
            rows, seconds = len(plan.rows), output.finished_at - output.started_at
            followed = sum(row.request_id not in self._behind for row in plan.rows) / rows
            self.payoff.add(rows, plan.num_tokens, num_given, seconds, followed * output.drafting)

    def _finish(self, request: Request, reason: str) -> None:
        super()._finish(request, reason)
        self.acceptances.pop(request.id, None)
        self._behind.discard(request.id)
