"""A worker: computes steps on one device, in the order in which they are submitted.

`submit` waits for nothing, so on a GPU the next step is planned and submitted while this one runs. What it samples goes
to the request's slot, where the next step finds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_impl.executor.batch import HostBatch, as_batch, lay_out
from reference_impl.executor.graphs import GraphKey, Graphs, Recorder, inert, longest_bucket, padded
from reference_impl.executor.slots import Slots
from reference_impl.interfaces import (
    AttentionBackend,
    Clock,
    KVCache,
    KVSpec,
    Reply,
    Sampled,
    Sampler,
    Step,
    TokenLogprobs,
)
from reference_impl.models.decoder import Decoder
from reference_impl.sampling.sampler import Launched, Parameters, TorchSampler, launched, sample
from reference_impl.staging import Arrays, mark, to_device


@dataclass(frozen=True)
class Ticket:
    """A step that runs."""

    step: Step
    submitted_at: float
    sampling: list[int]  # the rows of the step that sample, in the order of what `finish` gives
    finish: Callable[[], Sampled]  # waits for the device
    ran: tuple[str, ...]
    finished_at: float | None  # None: it may still run


@dataclass
class Stats:
    """Since the executor was made."""

    eager_steps: int = 0
    replayed_steps: int = 0
    graphs_captured: int = 0


class LocalExecutor:
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap.

    max_num_seqs: requests that run at a time. max_len: positions of one.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        kv_specs: Sequence[KVSpec],
        clock: Clock,
        sampler: Sampler = sample,
        *,
        max_num_seqs: int,
        max_len: int,
    ):
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.kv_specs, self.clock, self.sampler = kv_specs, clock, sampler
        self.slots = Slots(max_num_seqs, max_len, kv_specs, model.device)
        self.graphs: Graphs | None = None
        self.stats = Stats()
        self._finished_at = -float("inf")  # the last step that was collected

    @property
    def max_in_flight(self) -> int:
        """2, unless the sampler is one that is asked for each token and waited for."""
        return 2 if isinstance(self.sampler, TorchSampler) else 1

    @torch.inference_mode()
    def submit(self, step: Step) -> Ticket:
        """Starts a step on the device."""
        now = self.clock.now()
        self.slots.apply(step)
        self.kv_cache.transfer(step.transfers)
        if not step.rows:
            return self._ticket(step, now, [], None, ())
        host = lay_out(step.rows, self.slots)
        parameters = self._parameters(host)
        key = self._graph_for(host, parameters)
        out, tensors, ran = self._compute(host) if key is None else self._replay(host, key)
        found: Launched | Sampled | None = None
        if key is not None and key.samples:
            assert parameters is not None
            found = launched(out, out, parameters.params)
        elif parameters is not None:
            found = self._launch(out, parameters, tensors, host)
        elif host.sampling:
            found = self._ask(out, tensors, host)
        self.slots.advance(tensors)
        return self._ticket(step, now, [host.order[place] for place in host.sampling], found, ran)

    def _compute(self, host: HostBatch) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        """Logits of the rows that sample; the arrays on the device; which attention ran."""
        self.stats.eager_steps += 1
        tensors = to_device(host.arrays, self.model.device)
        return self._logits(host, tensors), tensors, self._ran()

    def _logits(self, host: HostBatch, tensors: Mapping[str, Tensor]) -> Tensor:
        found = self.slots.look_up(tensors, max(host.context_lens))
        return self.model(as_batch(host, {**tensors, **found}, self.kv_specs), self.kv_cache, self.attention)

    # --- sampling -------------------------------------------------------------------------------------------------

    def _parameters(self, host: HostBatch) -> Parameters | None:
        """For a sampler that is launched; its arrays are then copied with the batch's. None also if no row samples."""
        if not host.sampling or not isinstance(self.sampler, TorchSampler):
            return None
        parameters = self.slots.parameters(
            [host.slots[at] for at in host.sampling], [host.context_lens[at] for at in host.sampling]
        )
        if self.sampler.captures:
            host.arrays.update({f"sampling.{name}": array for name, array in parameters.arrays.items()})
        return parameters

    def _launch(
        self, logits: Tensor, parameters: Parameters, tensors: Mapping[str, Tensor], host: HostBatch
    ) -> Launched:
        assert isinstance(self.sampler, TorchSampler)
        found = self.sampler.launch(logits, parameters, _of_sampler(tensors) or None)
        self.slots.put(tensors, found.tokens)
        if parameters.penalties is not None:
            holds = [self.slots.host[host.slots[at]].holds for at in host.sampling]
            self.slots.counts.add(parameters.penalties, found.tokens, holds)
        return found

    def _ask(self, logits: Tensor, tensors: Mapping[str, Tensor], host: HostBatch) -> Sampled:
        """A sampler that is asked, and waited for: it sees the requests' tokens, so that they are kept up to date."""
        asking = [self.slots.host[host.slots[at]] for at in host.sampling]
        sampled = self.sampler(logits, asking)
        chosen = to_device({"tokens": np.array(sampled.tokens, np.int64)}, self.model.device)["tokens"]
        self.slots.put(tensors, chosen)
        for slot, token in zip(asking, sampled.tokens, strict=True):
            if not slot.holds:
                slot.tokens.append(token)
        return sampled

    def _ran(self) -> tuple[str, ...]:
        return tuple(sorted(getattr(self.attention, "ran", ())))  # a learner's backend need not say

    def _ticket(
        self, step: Step, now: float, sampling: list[int], found: Launched | Sampled | None, ran: tuple[str, ...]
    ) -> Ticket:
        device = self.model.device
        finished_at = self.clock.now() if device.type == "cpu" or isinstance(found, Sampled) else None
        if isinstance(found, Launched):
            finish = found.finish
        else:
            wait, sampled = mark(device), found or Sampled([], [])
            finish = lambda: (wait(), sampled)[1]  # noqa: E731
        return Ticket(step, now, sampling, finish, ran, finished_at)

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int) -> None:
        """From now on steps in which everybody decodes are replayed. max_rows: requests that run at a time; max_len:
        positions of one. Needs a cache write that skips negative slots: that of the fused path (writes_and_attends).
        """
        this = weakref.proxy(self)  # in a cycle, weights and cache would live until Python's collector comes by
        self.graphs = Graphs(
            lambda *given: this._captured(*given), lambda: this._ran(), self.slots.num_slots, max_rows, max_len,
            self.model.device, recorder,
        )  # fmt: skip

    def _captured(self, host: HostBatch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        logits = self._logits(host, tensors)
        if not samples:
            return logits
        assert isinstance(self.sampler, TorchSampler)
        tokens = self.sampler.choose(logits, None, _of_sampler(tensors))
        self.slots.put(tensors, tokens)
        return tokens

    def _run_graph(self, key: GraphKey, host_arrays: Arrays) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        assert self.graphs is not None
        if key not in self.graphs:
            tune = getattr(self.model, "tune", None)  # measures which kernels suit so many rows
            if tune is not None:
                with self.graphs.recorder.launches():
                    tune(key.rows)
            self.stats.graphs_captured += 1
        return self.graphs.run(key, host_arrays)

    def _graph_for(self, host: HostBatch, parameters: Parameters | None) -> GraphKey | None:
        if self.graphs is None:
            return None
        samples = parameters is not None and not parameters.needs_logits
        return self.graphs.key(host, samples and isinstance(self.sampler, TorchSampler) and self.sampler.captures)

    def _replay(self, host: HostBatch, key: GraphKey) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        """As `_compute`; tokens instead of logits, where the key samples."""
        self.stats.replayed_steps += 1
        out, tensors, ran = self._run_graph(key, padded(host.arrays, key, self.slots.num_slots))
        return out[: len(host.slots)], tensors, ran

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        """Captures every graph that sampling without penalties and log-probabilities may need, for contexts of up to
        `longest` positions: seconds, that would be lost later, each when it is needed first. Returns how many."""
        if self.graphs is None:
            return 0
        before, bound = self.stats.graphs_captured, self.graphs.max_len
        if longest is not None:
            bound = longest_bucket(longest, self.graphs.max_len)
        samples = isinstance(self.sampler, TorchSampler) and self.sampler.captures
        for key in self.graphs.keys(samples):
            if key.longest <= bound:
                self._run_graph(key, inert(key, self.slots.num_slots))
        return self.stats.graphs_captured - before

    def collect(self, ticket: Ticket) -> Reply:
        sampled, step = ticket.finish(), ticket.step
        # One device computes one step at a time: it began this one when the one before was finished.
        started = max(ticket.submitted_at, self._finished_at)
        self._finished_at = self.clock.now() if ticket.finished_at is None else ticket.finished_at
        tokens: list[tuple[int, ...]] = [()] * len(step.rows)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for row, token, report in zip(ticket.sampling, sampled.tokens, sampled.logprobs, strict=True):
            tokens[row] = (token,)
            if report is not None:
                logprobs[row] = (report,)
        return Reply(step.step_id, tuple(tokens), logprobs, started, self._finished_at, ticket.ran)

    def close(self) -> None:
        """Lets the graphs go, and with them their memory; later steps would be eager."""
        if self.graphs is not None:
            self.graphs.recorder.forget()
            self.graphs = None


def _of_sampler(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("sampling."): t for name, t in tensors.items() if name.startswith("sampling.")}
