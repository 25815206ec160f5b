"""Plans steps for an executor that runs stages (pipeline parallelism): one step per stage is in flight, and none has a
row that needs a token which another samples.

A request waits until its own token is there, except for the next chunk of its prompt, and no step takes more than its
share of the requests that decode: otherwise all of them would be in one step, and the other stages idle.

The executor's side is `RunsStages` in interfaces/abilities.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import Request


class Staged(SchedulerFeature):
    """Plans for stages. num_stages: the executor's, at least 2."""

    def __init__(self, scheduler: Scheduler, num_stages: int):
        self.scheduler, scheduler.num_stages = scheduler, num_stages

    def able(self, requests: Sequence[Request]) -> Sequence[Request]:
        room, found = self._decoding_share(), []
        for request in requests:
            decodes = request.num_missing_tokens == 1
            if not request.num_in_flight and (room or not decodes):  # or the next step takes it
                found.append(request)
                room -= decodes
        return found

    def _decoding_share(self) -> int:
        """How many requests may decode in this step, at least one.

        With R running requests, in flight or not, and S stages it is R/S, rounded up in some steps and down in others,
        so that any S steps in a row have room for all R, and no stage idles."""
        s = self.scheduler
        turn, num_running = s.step_id % s.num_stages, len(s.running)
        return max(1, num_running * (turn + 1) // s.num_stages - num_running * turn // s.num_stages)
