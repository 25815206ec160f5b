"""A forked request gets a slot of its own and takes its first tokens from its parent's: what the worker has is not sent
again. This extends `Planner.opened`.
"""

from __future__ import annotations

from reference_impl.core.planner import Planner, Sent
from reference_impl.interfaces import Opened


class ForkingPlanner(Planner):
    def opened(self, sent: Sent) -> Opened:
        opened = super().opened(sent)
        fork_of = self._parent_of(sent)
        return opened if fork_of is None else opened._replace(tokens=opened.tokens[fork_of[1] :], fork_of=fork_of)

    def _parent_of(self, sent: Sent) -> tuple[int, int] | None:
        """The value of `Opened.fork_of`, for tokens that the worker did not sample; None: all tokens are sent."""
        request = sent.request
        parent = None if request.parent_id is None else self.sent.get(request.parent_id)
        if parent is None or parent.opened_in == sent.opened_in:
            return None
        num_sent = len(parent.request.tokens) if parent.request.holds else parent.request.num_prompt_tokens
        num_shared = min(request.num_computed_tokens, num_sent, parent.num_tokens)
        if request.tokens[:num_shared] != parent.request.tokens[:num_shared]:  # a later request of this name
            return None
        return (parent.slot, num_shared) if num_shared else None
