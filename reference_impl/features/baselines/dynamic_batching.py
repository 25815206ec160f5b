"""Dynamic batching: static batches that wait for more requests, but not for long, like batchers of model servers."""

from __future__ import annotations

from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.interfaces import KVManager, StepPlan


class DynamicBatching(StaticBatching):
    """A batch starts when it is full or when its oldest request has waited `window` seconds.

    That bounds how long a single request waits for others, and nothing else: once started, a batch is static.
    While only the window keeps requests waiting, a plan is empty and `next_event` says until when.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int, window: float):
        super().__init__(kv, max_num_seqs)
        if not 0 <= window < float("inf"):
            raise ValueError(f"window (seconds): expected a finite number, at least 0, got {window!r}")
        self.window = window
        self._now = float("-inf")

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, now: float) -> StepPlan:
        self._now = now
        return super().schedule(now)

    def next_event(self, now: float) -> float | None:
        """When the window closes for waiting requests, in seconds; None if it has, or if there is work already."""
        if self.running or not self.waiting or len(self.waiting) >= self.max_num_seqs:
            return None
        closes = self.waiting[0].arrival + self.window
        return closes if closes > now else None

    def may_start(self) -> bool:
        return bool(self.waiting) and self.next_event(self._now) is None
