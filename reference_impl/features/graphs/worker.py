"""A worker that replays steps in which every row decodes as CUDA graphs, like vLLM and SGLang. Its `GraphRun`s choose
the graph, replay it, and sample where the graph does not."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch, as_batch
from reference_impl.core.sampler import SETTINGS, TorchSampler
from reference_impl.core.staging import Arrays
from reference_impl.core.worker import NO_TOKEN, StepRun, Worker, not_finite

if TYPE_CHECKING:
    from reference_impl.features.graphs.graphs import GraphKey, Graphs, Recorder
    from reference_impl.features.speculative.feature_head import KeepsHidden


@dataclass
class Stats:
    """Counts of a worker's steps since it uses graphs."""

    eager_steps: int = 0
    replayed_steps: int = 0
    graphs_captured: int = 0


class GraphWorker(Worker):
    """A worker that is eager until `use_graphs`. tap: its model, where hidden states are read after a step."""

    model: Any
    makes_trees = False  # whether drafts are trees
    tap: KeepsHidden | None = None

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.graphs: Graphs | None = None
        self.stats = Stats()

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int, num_drafts: int = 0) -> None:
        """Replays, from now on, steps in which all rows decode. max_rows: requests that run at a time; max_len:
        positions of one; num_drafts: how many a row usually has. Needs attention that takes bounds of lengths, and a
        cache write that skips negative slots: that of the fused path (writes_and_attends).
        """
        from reference_impl.features.graphs.graphs import Graphs
        from reference_impl.features.graphs.run import GraphRun

        this = weakref.proxy(self)  # in a cycle, weights and cache would live until the garbage collector runs
        self.graphs = Graphs(
            lambda *given: this._captured(*given), lambda: this._ran(), self.slots.num_slots, max_rows, max_len,
            self.model.device, recorder, num_drafts=num_drafts, hidden=lambda: this._hidden(), trees=self.makes_trees,
        )  # fmt: skip
        self.run_kind = GraphRun

    @property
    def samples_in_graphs(self) -> bool:
        return isinstance(self.sampler, TorchSampler) and self.sampler.captures

    def _captured(self, host: HostBatch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        t = {**tensors, **self.slots.look_up(tensors, max(host.context_lens))}
        batch = as_batch(host, t, self.kv_specs)
        logits: Tensor = self.model(batch, self.kv_cache, self.attention)
        if not samples:
            return logits
        tokens = self.sampler.choose(logits, t)
        self.slots.put(t, tokens)
        return tokens.masked_fill(not_finite(logits), NO_TOKEN)

    def _hidden(self) -> Tensor | None:
        return None if self.tap is None else self.tap.features

    def _ran(self) -> tuple[str, ...]:
        return () if self.names_kernels is None else tuple(sorted(self.names_kernels.ran))

    def inert_columns(self, key: GraphKey) -> Arrays:
        """The sampler's columns for rows that pad, which are greedy (temperature 0)."""
        if not key.samples:
            return {}
        return self.sampler.columns(np.zeros(key.num_tokens, SETTINGS), np.zeros(key.num_tokens, np.int64))

    def replay(self, key: GraphKey, arrays: Arrays) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        """Runs a graph: see `Graphs.run`. Before it is captured the model is tuned for steps of so many tokens."""
        assert self.graphs is not None
        if key not in self.graphs:
            self.model.tune(key.num_tokens)  # a FusedDecoder measures which kernels suit so many
            self.stats.graphs_captured += 1
        return self.graphs.run(key, arrays)

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        """Captures every graph that sampling without penalties and log-probabilities may need, for contexts of up to
        `longest` positions: seconds that each would otherwise cost at its first use. Returns how many.

        RuntimeError while the model is watched: a graph would replay the observer's work."""
        if self.graphs is None:
            return 0
        from reference_impl.features.graphs.graphs import inert, longest_bucket

        if self.model.watched:
            raise RuntimeError(
                "capture_all: expected a model that is not watched; capture after features.watching ends"
            )
        before, bound = self.stats.graphs_captured, self.graphs.max_len
        if longest is not None:
            bound = longest_bucket(longest, self.graphs.max_len)
        for key in self.graphs.keys(self.samples_in_graphs):
            if key.longest <= bound:
                self.replay(key, inert(key, self.slots.num_slots, self.inert_columns(key)))
        return self.stats.graphs_captured - before

    def close(self) -> None:
        """Frees the graphs and their memory; later steps run eagerly."""
        super().close()
        if self.graphs is not None:
            self.graphs.recorder.forget()
            self.graphs, self.run_kind = None, StepRun
