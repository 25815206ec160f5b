"""Continuous batching as it began: Orca's iteration-level scheduling (Yu et al., OSDI 2022).

Requests join and leave the batch before every step, so none waits for another's output to end. What came later is
missing: prompts are not cut into chunks, so a step with a long prompt holds up every request that decodes, and
memory is reserved for the longest output, so fewer run than would fit.
"""

from __future__ import annotations

from reference_impl.features.baselines.whole_requests import WholeRequests
from reference_impl.interfaces import Request, StepOutput, StepPlan


class OrcaBatching(WholeRequests):
    """A scheduler: first come, first served, up to max_num_seqs rows. A request enters when its longest output has
    room."""

    def schedule(self, now: float) -> StepPlan:
        entered = self._let_in()
        return self._plan([self.row_of(request) for request in self.running], entered)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Returns requests that have their last token; their rows and blocks are free for the next step."""
        ended = self._append(plan, output)
        for request in ended:
            self.running.remove(request)
            self._leave(request)
        return ended
