"""Watches for rows of a step that have no token (`Reply.errors`), or no hidden state: see `Recovery`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import Afterwards, EngineFeature, Flight
from reference_impl.interfaces import Reply

if TYPE_CHECKING:
    from reference_impl.features.failing.recovery import Recovery


class Failing(EngineFeature):
    def __init__(self, engine: Engine):
        self.engine = engine
        self.recovery: Recovery | None = None  # from the first such row on

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        broken = [at for at, (_, values) in reply.pooled.items() if not all(map(math.isfinite, values))]
        if not (reply.errors or broken or (self.recovery is not None and self.recovery.stale)):
            return reply, None
        if self.recovery is None:
            from reference_impl.features.failing.recovery import Recovery

            self.recovery = Recovery(self.engine)
        return self.recovery.collected(flight, reply, broken)
