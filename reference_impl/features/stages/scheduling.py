"""Steps for an executor that runs stages (pipeline parallelism): one step per stage is in flight, and none has a row
that needs a token which another samples.

A request waits until its own token is there, except for the next chunk of its prompt, and no step takes more than its
share of the requests that decode: otherwise all of them would be in one step, and the other stages idle.

Extends `Scheduler._shares`. The executor's side is `RunsStages` in interfaces/abilities.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.scheduler import OpenPlan, Scheduler, Shares
from reference_impl.interfaces import Request


class Staged(Scheduler):
    """num_stages: of the executor, at least 2."""

    def __init__(self, *core: Any, num_stages: int, **options: Any):
        super().__init__(*core, **options)
        self.num_stages = num_stages

    def _shares(self, requests: Sequence[Request], plan: OpenPlan) -> Shares:
        room, able = self._decoding_share(), []
        for request in requests:
            decodes = request.num_missing_tokens == 1
            if not request.num_in_flight and (room or not decodes):  # or the next step takes it
                able.append(request)
                room -= decodes
        return super()._shares(able, plan)

    def _decoding_share(self) -> int:
        """How many requests may decode in this step.

        Of R that run, in flight or not, it is R/S, rounded up in some steps and down in others, so that any S steps in
        a row have room for all R, and no stage idles; but at least one."""
        of, turn, num_running = self.num_stages, self._step_id % self.num_stages, len(self.running)
        return max(1, num_running * (turn + 1) // of - num_running * turn // of)
