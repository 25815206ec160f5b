"""A step that is computed by a graph if every row of it decodes."""

from __future__ import annotations

from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.features.graphs.graphs import GraphKey, padded
from reference_impl.features.graphs.worker import GraphWorker


class GraphRun(StepRun):
    worker: GraphWorker
    key: GraphKey | None = None  # of the graph that computes this step

    def _samples_in_graph(self) -> bool:
        """Whether the graph may choose the tokens: the sampler can be captured, and nothing but tokens is needed."""
        if not self.sampler.captures or self.batch.settings["logprobs"].max(initial=-1) >= 0:
            return False
        return not any(part.needs_logits(self) for part in self.parts)

    def stage(self) -> None:
        w, batch = self.worker, self.batch
        if w.graphs is not None and self.model is w.model and not w.model.watched:
            self.key = w.graphs.key(batch, self._samples_in_graph())
        if self.key is None:
            w.stats.eager_steps += 1
            return super().stage()
        w.stats.replayed_steps += 1
        self.replayed = True
        columns = self.sampler.columns(batch.settings, batch.lengths)
        # What the graph does not read: of drafts, and of sampling outside.
        others = {name: array for name, array in batch.arrays.items() if name.startswith("draft.")}
        self.tensors = to_device(others if self.key.samples else others | columns, w.model.device)
        batch.arrays.update(columns)

    def compute(self) -> None:
        w, key = self.worker, self.key
        if key is None:
            return super().compute()
        arrays = padded(self.batch.arrays, key, w.slots.num_slots, w.inert_columns(key))
        out, inputs, self.ran = w.replay(key, arrays)
        num = len(self.batch.sampling)
        self.logits = self.scores = out[:num]  # tokens, where the graph samples
        self.tensors = {**inputs, **self.tensors}
        if not key.samples:
            slots, lens = ("sampling_slots", "sampling_lens") if key.tokens_per_row > 1 else ("slots", "query_lens")
            slot = inputs[slots][:num]
            position = w.slots.computed.index_select(0, slot) + inputs[lens][:num]
            self.tensors |= {"sampling_slots": slot, "sample_positions": position}
        if w.tap is not None:
            assert w.graphs is not None
            w.tap.features = w.graphs.hidden_of(key)[:num]  # behind them are those that pad

    def sample(self) -> None:
        if self.key is not None and self.key.samples:
            self.take(self.logits)
        else:
            super().sample()
