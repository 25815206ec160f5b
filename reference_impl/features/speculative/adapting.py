"""How many drafts pay: as many as make tokens come fastest, by how often they are kept and what steps take.

One more token in a step takes b seconds, and the engine gives r tokens a second. The j-th draft token of a request is
kept with all before it with probability a^j, a being its acceptance. So it is worth its time while a^j > b r, its
price. At the best rate r no draft token can be exchanged for a better one (Dinkelbach 1967), and r is that of the steps
just done, so it gets there. In a large batch a step is full, r is high, and drafts end by themselves; where none pays,
there are none but a trial now and then, and the plan says for how many rows (`StepPlan.num_undrafted`, in the trace
`DraftUse`).

Not all that drafts cost grows with their number. A model runs once more for each further one, for all requests at
once; the first of a step may cost more than a further one, since a product of one row and one of two are different
kernels. So how deep a step drafts is decided for all requests: of the depths from none to `num_drafts`, that at which
tokens are expected to come fastest, by what such steps took (`step_costs.py`). What a step without any takes is
measured every PLAIN_AFTER steps, if drafts leave none. Steps with prompts show nothing of this, and in a loaded engine
most are such. So a batch more than twice as large as any that was measured has no drafts: what is free for one request
is not for sixty.

A model that does not pay as a whole is switched off (`payoff.py`, `StepPlan.keeps_up`), and tried again later. Requests
that it has not kept up with get no drafts any more, so a later trial is with new ones. Medusa heads and early exit
draft from what the target computed in the step before: they are judged alike, and a later trial is with all requests,
from its second step on. Extends `Drafting.cut`, `useful_drafts`, `schedule`, `update` and `finish`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from reference_impl.core.scheduler import Shares
from reference_impl.features.speculative.payoff import LEAST_SEEN, LEAST_WON, MEMORY, RECENTLY_OFF, TRIAL_STEPS, Payoff
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.speculative.step_costs import NUM_TIMES, STALL, StepCosts
from reference_impl.interfaces import Request, StepOutput, StepPlan

PLAIN_AFTER = 48  # steps with drafts, until two have none: the second shows what such a step takes
LIKE_OTHERS = 32  # drafts that all requests together count for in what is expected of one
AT_FIRST = 0.8  # before any drafts; those that are too many end soon
MOST_TAKEN = 1 / 32  # of the budget, by drafts, where prompts could use all of it
TRIAL_AFTER = 32  # steps without drafts, until a request has one tried again; twice as many if it is wrong


@dataclass
class Acceptance:
    """How often drafts are kept, of one request or of all. What is older counts less."""

    kept: float = 0.0
    missed: float = 0.0
    num_idle: int = 0  # steps since its last draft token
    patience: int = TRIAL_AFTER  # of such steps before a trial

    def add(self, num_drafts: int, num_kept: int) -> None:
        # Without drafts, too: of what was long ago nothing follows.
        self.kept += num_kept - self.kept / MEMORY
        self.missed += (num_kept < num_drafts) - self.missed / MEMORY
        if not num_drafts:
            self.num_idle += 1
        else:
            if self.num_idle >= self.patience or num_kept:
                self.patience = TRIAL_AFTER if num_kept else 2 * self.patience
            self.num_idle = 0

    def chance(self, expected: float, weight: float) -> float:
        """The probability that a draft token is kept if those before it were. expected: what is assumed where little
        was seen, as if `weight` drafts had shown it."""
        return (self.kept + weight * expected) / (self.kept + self.missed + weight)


def _num_worth(price: float, chance: float, most: int) -> int:
    """The largest k up to `most` with chance^k > price, for chances below 1."""
    k = 0
    while k < most and chance ** (k + 1) > price:
        k += 1
    return k


class Adapting(Drafting):
    """num_drafts: the most that a row has. must_follow: the draft model (if there is one) has to compute all that it
    does not draft, too, to go on; otherwise the step before is enough."""

    def __init__(self, *core: Any, must_follow: bool = True, **options: Any):
        super().__init__(*core, **options)
        self.must_follow = must_follow
        self.costs = StepCosts()
        # Of the step that is planned: tokens that the engine gives in the time of one more draft token (None until that
        # was measured); drafts of a row, at most.
        self.price: float | None = None
        self._most = self.num_drafts
        self._ended: float | None = None  # the step before, if this one is planned right behind it
        self._num_with_drafts = 0  # steps, since one showed what it takes without
        self._measures = False  # what a step takes without: the one that is planned has none
        self.acceptances: dict[str, Acceptance] = {}
        self.of_all = Acceptance()  # what is expected of a request before its first draft token
        self._losing: set[str] = set()  # requests whose drafts would lose, in the step that is planned
        self.payoff = Payoff()  # of a draft model
        self._behind: set[str] = set()  # requests that it has not kept up with
        self._prompts: dict[str, float] = {}  # seconds that it took for a request's prompt
        self._prompt_seconds: deque[float] = deque(maxlen=NUM_TIMES)  # for a token, of the newest steps with prompts
        self._lengths: deque[int] = deque(maxlen=MEMORY)  # tokens that requests gave

    def schedule(self, now: float) -> StepPlan:
        self.has_drafts = self.payoff.on
        if not self.payoff.on:
            plan = super().schedule(now)
            self._behind.update([row.request_id for row in plan.rows])
            num_undrafted = sum([samples and num_tokens == 1 for _, _, num_tokens, samples, _, _ in plan.rows])
            keeps_up = not plan.rows
        else:
            self._losing.clear()
            self._measures = self._num_with_drafts >= PLAIN_AFTER or self.costs.asks_for_plain(len(self.running))
            self._measures &= self.costs.all_decode
            self._measures |= not self.costs.has_plain_like(len(self.running))
            self._most = self._depth_that_pays()
            plan = super().schedule(now)
            num_undrafted = sum(row.request_id in self._losing and not row.num_drafts for row in plan.rows)
            # A row that begins anew is followed from its first token; if need be, every row from here on.
            followed = (row.request_id for row in plan.rows if not (self.must_follow and row.start))
            self._behind.difference_update(followed)
            keeps_up = not plan.rows or any(row.request_id not in self._behind for row in plan.rows)
        if num_undrafted or not keeps_up:
            return replace(plan, num_undrafted=num_undrafted, keeps_up=keeps_up)
        return plan

    def cut(self, shares: Shares, left: int) -> Shares:
        if self.has_drafts:
            num_missing = [missing for _, missing in shares if missing > 1]
            if sum(num_missing) > left:  # a draft token takes the place of a prompt's token, which is never in vain
                most = int(MOST_TAKEN * self.max_num_batched_tokens)
                self._most = min(self._most, most // max(1, len(shares) - len(num_missing)))
        return super().cut(shares, left)

    def useful_drafts(self, request: Request) -> int:
        most = super().useful_drafts(request)
        if not most or self._measures:
            return 0
        if request.id in self._behind:
            self._losing.add(request.id)
            return 0
        num = min(most, self._num_that_pay(request))
        if not num and self.price is not None:
            self._losing.add(request.id)
        return num

    def _num_that_pay(self, request: Request) -> int:
        if self.price is None:  # where a step without any was measured, one with one for each is
            return int(self.costs.all_decode and len(self.costs.plain.seconds) > 0)
        found = self.acceptances.get(request.id, self.of_all)
        k = _num_worth(self.price, self._chance(found), self._most)
        return k or int(found.num_idle >= found.patience)

    def _depth_that_pays(self) -> int:
        """The depth, 0 to `num_drafts`, at which tokens are expected to come fastest."""
        num_rows = len(self.running)
        seconds = self.costs.slope(num_rows)
        if seconds is None or not num_rows or not self.costs.has_drafts_like(num_rows):
            self.price = None
            return self.num_drafts
        least = self.costs.seconds(num_rows, 0, 0)
        # The newest steps may have had fewer rows, as those with prompts do not count: of the rate without drafts one
        # is sure. On a coarse clock a step may take no time.
        self.price = price = seconds * max(self.costs.rate, num_rows / least if least else 0.0)
        kept, rows = [0.0] * (self.num_drafts + 1), [0] * (self.num_drafts + 1)  # at each depth
        for request in self.running:
            if request.id in self._behind:
                continue
            likely = chance = self._chance(self.acceptances.get(request.id, self.of_all))
            for depth in range(1, self.num_drafts + 1):
                if likely <= price:
                    break
                kept[depth] += likely
                rows[depth] += 1
                likely *= chance
        tokens, drafts = float(num_rows), 0
        best, most = 0, tokens  # which take `least` seconds
        for depth in range(1, self.num_drafts + 1):
            if not rows[depth]:
                break
            tokens, drafts = tokens + kept[depth], drafts + rows[depth]
            took = self.costs.seconds(num_rows, drafts, depth)
            if tokens * least > most * took:
                best, most, least = depth, tokens, took
        return best

    def _chance(self, found: Acceptance) -> float:
        return found.chance(self.of_all.chance(AT_FIRST, 2), LIKE_OTHERS)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        began = output.started_at if self._ended is None else self._ended
        if self.payoff.on:
            self._note_kept(plan, output)
        if all(row.num_tokens == 1 for row in plan.rows):
            self._note_decoding(plan, output, output.finished_at - began)
        else:
            self.costs.interrupt()
            if self.payoff.on and output.drafting:
                self._note_prompts(plan, output.drafting)
                self.payoff.pass_over(any(row.num_drafts for row in plan.rows))
        finished = super().update(plan, output)
        self._ended = output.finished_at if self.running else None
        return finished

    def _note_kept(self, plan: StepPlan, output: StepOutput) -> None:
        for row in plan.rows:
            tokens = output.tokens.get(row.request_id, ())
            if row.request_id in self.requests and tokens:
                of_request = self.acceptances.setdefault(row.request_id, Acceptance())
                of_request.add(row.num_drafts, len(tokens) - 1)
                if row.num_drafts:
                    self.of_all.add(row.num_drafts, len(tokens) - 1)

    def _note_decoding(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        if not plan.rows:
            return
        num_given = sum(map(len, output.tokens.values()))
        was_on = self.payoff.on
        if was_on:
            showed_plain = self.costs.add(plan, num_given, seconds, output.drafting)
            self._num_with_drafts = 0 if showed_plain else self._num_with_drafts + (plan.num_tokens > len(plan.rows))
            if output.drafting:
                self._judge(plan, num_given, seconds, output.drafting)
        else:
            if self.payoff.num_steps % TRIAL_STEPS == 0:  # few are enough
                self.costs.add_alone(len(plan.rows), seconds)
            self.payoff.wait()
        if self.payoff.on != was_on:  # the next step is not like this one
            self.costs.interrupt()
            if self.payoff.on:  # or what was seen before it was off would keep a trial from drafting at all
                self.of_all = Acceptance()
                self.acceptances.clear()

    def _judge(self, plan: StepPlan, num_given: int, seconds: float, drafting: float) -> None:
        num_rows = len(plan.rows)
        alone = self.costs.seconds_alone(num_rows) if self.payoff.num_steps < RECENTLY_OFF else None
        plain = self.costs.plain_seconds(num_rows) if alone is None else alone
        if not plain:  # not known; or the clock is too coarse to say what is lost
            return
        # What it does for rows that it has not kept up with is no cost of those that it drafts for.
        behind = sum(row.request_id in self._behind for row in plan.rows) / num_rows
        spent = seconds - plain - behind * drafting
        spent += num_given * self._prompt_seconds_of_a_token(plan) / num_rows
        self.payoff.add(num_rows, num_given, plain, spent, LEAST_SEEN if alone is None else LEAST_WON)

    def _note_prompts(self, plan: StepPlan, drafting: float) -> None:
        """Notes what the draft model took for prompts. drafting: its seconds in this step."""
        self._prompt_seconds.append(drafting / plan.num_tokens)
        usual = min(self._prompt_seconds[-1], STALL * statistics.median(self._prompt_seconds))
        for row in plan.rows:
            if row.num_tokens > 1 and row.request_id in self.requests:  # not aborted meanwhile
                self._prompts[row.request_id] = self._prompts.get(row.request_id, 0.0) + usual * row.num_tokens

    def _prompt_seconds_of_a_token(self, plan: StepPlan) -> float:
        """The draft model's seconds for prompts, for one token of each row: what a row's prompt took, divided by the
        tokens that its request may give."""
        usual = statistics.fmean(self._lengths) if self._lengths else math.inf
        names = [row.request_id for row in plan.rows if row.request_id in self._prompts]
        return sum(self._prompts[name] / min(usual, self.requests[name].sampling.max_tokens) for name in names)

    def finish(self, request: Request, reason: str) -> None:
        super().finish(request, reason)
        self.acceptances.pop(request.id, None)
        self._prompts.pop(request.id, None)
        self._lengths.append(max(1, request.num_tokens - request.num_prompt_tokens))
        self._behind.discard(request.id)
