"""A feature head or Medusa heads behind steps that are replayed as CUDA graphs.

A graph hands out the hidden states of its tokens beside what was sampled; what it looked up lies in memory that other
graphs use, so that the draft looks it up again. Extends `GraphWorker.hidden` and `FeatureRun.compute`.
"""

from __future__ import annotations

from torch import Tensor

from reference_impl.features.graphs.worker import GraphRun
from reference_impl.features.speculative.draft_graphs import DraftGraphWorker
from reference_impl.features.speculative.feature_worker import FeatureRun, FeatureWorker

_ARRAYS = "slots", "query_lens", "token_slots", "offset", "query_start_loc"


class FeatureGraphWorker(FeatureWorker, DraftGraphWorker):
    def hidden(self) -> Tensor | None:
        found: Tensor = self.tap.features
        return found


class FeatureGraphRun(FeatureRun, GraphRun):
    worker: FeatureGraphWorker

    def compute(self) -> None:
        super().compute()
        w = self.worker
        if self.key is None:
            return
        assert w.graphs is not None
        w.tap.features = w.graphs.hidden_of(self.key)[: len(self.batch.sampling)]  # behind them are those that pad
        # Before `take`, by which lengths change. Rows that pad are left out: keys would be written for them.
        mine = {name: self.tensors[name][: len(self.batch.arrays[name])] for name in _ARRAYS}
        self.known = mine | w.slots.look_up(mine, max(self.batch.context_lens))
