"""Decides whether a draft model pays as a whole.

It also computes what it does not draft, to keep up with the text: time that no number of drafts gives back. So its
steps are compared with what the same tokens would take without it. Where that is not LEAST_WON more, prompts included,
it is switched off, for so long that all trials together cost at most MOST_LOST of the time. A draft model that wins
less than that may as well lose: with drafts requests end at different steps, so that the last ones decode alone. That
took 7 % of a call of 8 requests of equal length, where drafts won 5 % in steps in which all decode.

What steps take without it is only known while it is off. Beside it the target's own part of a step takes longer, since
the two share the processor's caches: 8 % was seen, for a model that fits into them. So at first, and where it was off
long ago, it has to win LEAST_SEEN of what steps take in which it drafts nothing. Where it wins less, it is off for a
while, and the next trial knows more. It is also switched off after MOST_UNUSED steps with prompts in a row, none of
them with drafts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reference_impl.features.speculative.step_costs import STALL

MEMORY = 64  # steps that are judged
TRIAL_STEPS = 8  # before it is judged
COLD_STEPS = 4  # the first of a trial, in which a model takes longer: they do not count
ERRORS = 1  # standard errors of what drafts give, which are left out where it is judged: a few steps say little
OFF_STEPS = 256  # without it, until it is tried again, at least; twice as many if it loses again
MOST_UNUSED = 128  # steps with prompts, one behind another, that it keeps up with and drafts nothing in
MOST_LOST = 0.01  # of the time without it, in its trials
LEAST_WON = 0.08  # of the time without it, or it is switched off
LEAST_SEEN = 0.15  # the same, held against steps in which it drafts nothing and keeps up
RECENTLY_OFF = 256  # steps since it was off, as long as steps without it say what one takes


@dataclass
class Payoff:
    """What a draft model wins or loses in steps in which all decode. on: whether it is computed. num_steps: steps since
    it was switched on or off."""

    on: bool = True
    num_steps: int = 0
    patience: int = OFF_STEPS // 2  # steps without it, before a trial
    _num_unused: int = 0  # steps, see MOST_UNUSED
    # The newest steps with it: tokens that drafts gave; tokens without them; seconds that such a step takes without
    # the model and its drafts; seconds of these two, with the step's share of those for prompts.
    _steps: deque[tuple[int, int, float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def add(self, num_rows: int, num_given: int, plain: float, spent: float, least: float = LEAST_WON) -> None:
        """Counts a step with the model. num_rows: rows of the step; it drafts for some. plain: the seconds that such a
        step takes without it. spent: the seconds beyond that. least: the share of plain that it has to win, or it is
        switched off."""
        self.num_steps += 1
        self._num_unused = 0
        if self.num_steps <= COLD_STEPS:
            return
        self._steps.append((num_given - num_rows, num_rows, plain, spent))
        if (self.num_steps - COLD_STEPS) % TRIAL_STEPS == 0 and self._lost(ERRORS) > -least:
            patience = OFF_STEPS if self.num_steps > MEMORY else 2 * self.patience
            self.patience = max(patience, math.ceil((COLD_STEPS + len(self._steps)) * self._lost() / MOST_LOST))
            self._switch(False)

    def _lost(self, errors: float = 0.0) -> float:
        """What it loses in a step, as a share of the time of one without it; below 0: it wins. errors: by how many
        standard errors drafts are assumed to give more than was seen."""
        gains, rows, plain, spent = zip(*self._steps, strict=True)
        num_steps, gain = len(gains), sum(gains) / len(gains)
        gain += errors * math.sqrt(sum((g - gain) ** 2 for g in gains)) / num_steps
        return _without_stalls(spent) / _without_stalls(plain) - gain * num_steps / sum(rows)

    def pass_over(self, drafts: bool) -> None:
        """Counts a step with the model that is not judged, since not all decode. drafts: whether it had any."""
        self._num_unused = 0 if drafts else self._num_unused + 1
        if self._num_unused >= MOST_UNUSED:
            self._switch(False)

    def wait(self) -> None:
        """Counts a step without the model."""
        self.num_steps += 1
        if self.num_steps >= self.patience:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on, self.num_steps, self._num_unused = on, 0, 0
        self._steps.clear()


def _without_stalls(seconds: Sequence[float]) -> float:
    """The mean of the seconds, where what took longer than STALL medians counts as that."""
    most = STALL * sorted(seconds)[len(seconds) // 2]
    return sum(min(s, most) for s in seconds) / len(seconds)
