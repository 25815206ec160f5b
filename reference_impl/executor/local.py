"""Runs steps on one device, in the order in which they are submitted.

    submit = prepare (all that reads requests: host work only) + run (all that touches the device)
    collect: waits for the step

`run` waits for nothing, so on a GPU the next step is prepared while this one runs. What it sampled stays on the device,
too: the next step takes from there the tokens that the host does not know yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reference_impl.executor.batch import Arrays, HostBatch, as_batch, lay_out
from reference_impl.executor.graphs import GraphKey, Graphs, Recorder, inert, longest_bucket, padded
from reference_impl.interfaces import (
    UNKNOWN_TOKEN,
    AttentionBackend,
    Batch,
    Clock,
    KVCache,
    KVSpec,
    Request,
    Sampled,
    Sampler,
    StepOutput,
    StepPlan,
)
from reference_impl.models.decoder import Decoder
from reference_impl.sampling.sampler import Parameters, Pending, TorchSampler, pending, sample
from reference_impl.staging import mark, to_device


@dataclass(frozen=True)
class Step:
    """What `run` needs of a plan and its requests."""

    plan: StepPlan
    submitted_at: float
    batch: HostBatch | None = None  # None: there is nothing to compute
    unknown: bool = False  # does a token of its input come from the step before?
    parameters: Parameters | None = None  # for a sampler that is launched; None also if nobody samples
    requests: tuple[Request, ...] = ()  # that sample, for a sampler that is not: it is asked at once
    graph: GraphKey | None = None  # then the batch's arrays have its shapes


@dataclass(frozen=True)
class Ticket:
    """A step that runs."""

    step: Step
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
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        kv_specs: Sequence[KVSpec],
        clock: Clock,
        sampler: Sampler = sample,
    ):
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.kv_specs, self.clock, self.sampler = kv_specs, clock, sampler
        self.graphs: Graphs | None = None
        self.stats = Stats()
        self._places: dict[str, int] = {}  # where in the last step's tokens those of a request are
        self._tokens: Tensor | None = None  # [rows that sampled], of the last step that ran
        self._finished_at = -float("inf")  # the last step that was collected

    @property
    def can_overlap(self) -> bool:
        """Whether steps may be submitted while others run, with tokens that the host does not know."""
        return isinstance(self.sampler, TorchSampler)

    def submit(self, plan: StepPlan, requests: Mapping[str, Request]) -> Ticket:
        return self.run(self.prepare(plan, requests))

    # --- the host's part ------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """Reads all that the step needs of its requests. Steps are prepared, and run, in the order of submission."""
        now, before = self.clock.now(), self._places
        if not plan.rows:
            self._places = {}
            return Step(plan, now)
        batch = lay_out(plan, requests, self.kv_specs)
        ids = batch.sampling_ids
        self._places = {request_id: place for place, request_id in enumerate(ids)}
        unknown = self._find_sources(batch, before)
        sampling = tuple(requests[request_id] for request_id in ids)
        if not isinstance(self.sampler, TorchSampler) or not sampling:
            return self._as_graph(Step(plan, now, batch, unknown, None, sampling), samples=False)
        parameters = self.sampler.read(sampling)
        batch.arrays.update({f"sampling.{name}": array for name, array in parameters.arrays.items()})
        samples = self.sampler.captures and not parameters.needs_logits
        return self._as_graph(Step(plan, now, batch, unknown, parameters), samples)

    def _find_sources(self, batch: HostBatch, before: Mapping[str, int]) -> bool:
        """For tokens that the host does not know, where they are among those of the step before."""
        input_ids = batch.arrays["input_ids"]
        (unknown,) = np.nonzero(input_ids == UNKNOWN_TOKEN)
        if not len(unknown):
            return False
        rows = np.searchsorted(batch.arrays["query_start_loc"], unknown, side="right") - 1
        missing = [batch.request_ids[row] for row in rows if batch.request_ids[row] not in before]
        if missing or not self.can_overlap:
            raise ValueError(
                f"the last token of {missing or 'a request'} is UNKNOWN_TOKEN: expected one that the step submitted "
                "just before samples, and a sampler that can be launched (can_overlap)"
            )
        batch.arrays["source"] = np.zeros_like(input_ids)
        batch.arrays["source"][unknown] = [before[batch.request_ids[row]] for row in rows]
        return True

    def _as_graph(self, step: Step, samples: bool) -> Step:
        assert step.batch is not None
        key = None if self.graphs is None else self.graphs.key(step.batch, samples)
        if key is None:
            return step
        arrays = padded(step.batch.arrays, key, self.kv_specs)
        return replace(step, batch=replace(step.batch, arrays=arrays), graph=key)

    # --- the device's part ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, step: Step) -> Ticket:
        """Starts it on the device. Reads nothing of the requests that could have changed since `prepare`."""
        self.kv_cache.transfer(step.plan.transfers)
        if step.batch is None:
            return self._ticket(step, None, ())
        found, ran = self._run_eagerly(step, step.batch) if step.graph is None else self._replay(step, step.graph)
        if isinstance(found, Pending):
            self._tokens = found.tokens
            return self._ticket(step, found.finish, ran)
        if not step.requests:
            return self._ticket(step, None, ran)
        sampled = self.sampler(found, step.requests)
        return Ticket(step, lambda: sampled, ran, self.clock.now())

    def _run_eagerly(self, step: Step, host: HostBatch) -> tuple[Tensor | Pending, tuple[str, ...]]:
        """Logits, or what a sampler that can be launched makes of them."""
        self.stats.eager_steps += 1
        tensors = to_device(host.arrays, self.model.device)
        batch = as_batch(host, tensors, self.kv_specs)
        logits = self._logits(batch, tensors, self._tokens if step.unknown else None)
        if step.parameters is None:
            return logits, self._ran()
        assert isinstance(self.sampler, TorchSampler)
        last_tokens = batch.input_ids[batch.logits_indices]
        return self.sampler.launch(logits, step.parameters, last_tokens, _of_sampler(tensors)), self._ran()

    def _logits(self, batch: Batch, tensors: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
        """previous: the tokens of the step before, if any are needed."""
        batch.input_ids = _known(batch.input_ids, tensors, previous)
        return self.model(batch, self.kv_cache, self.attention)

    def _ran(self) -> tuple[str, ...]:
        return tuple(sorted(getattr(self.attention, "ran", ())))  # a learner's backend need not say

    def _ticket(self, step: Step, finish: Callable[[], Sampled] | None, ran: tuple[str, ...]) -> Ticket:
        device = self.model.device
        if finish is None:
            wait = mark(device)
            finish = lambda: (wait(), Sampled([], []))[1]  # noqa: E731
        return Ticket(step, finish, ran, self.clock.now() if device.type == "cpu" else None)

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int) -> None:
        """From now on steps in which everybody decodes are replayed. max_rows: requests that run at a time; max_len:
        positions of one. Needs a cache write that skips negative slots: that of the fused path (writes_and_attends).
        """
        this = weakref.proxy(self)  # in a cycle, weights and cache would live until Python's collector comes by
        self.graphs = Graphs(
            lambda *given: this._captured(*given), lambda: this._ran(), self.kv_specs, max_rows, max_len,
            self.model.device, recorder,
        )  # fmt: skip

    def _captured(self, batch: Batch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        logits = self._logits(batch, tensors, tensors["previous"])
        if not samples:
            return logits
        assert isinstance(self.sampler, TorchSampler)
        return self.sampler.choose(logits, None, _of_sampler(tensors))

    def _run_graph(self, key: GraphKey, arrays: Arrays, previous: Tensor | None) -> tuple[Tensor, tuple[str, ...]]:
        assert self.graphs is not None
        if key not in self.graphs:
            tune = getattr(self.model, "tune", None)  # measures which kernels suit so many rows
            if tune is not None:
                with self.graphs.recorder.launches():
                    tune(key.rows)
            self.stats.graphs_captured += 1
        return self.graphs.run(key, arrays, previous)

    def _replay(self, step: Step, key: GraphKey) -> tuple[Tensor | Pending, tuple[str, ...]]:
        assert self.graphs is not None
        assert step.batch is not None
        self.stats.replayed_steps += 1
        out, ran = self._run_graph(key, step.batch.arrays, self._tokens if step.unknown else None)
        out, parameters = out[: len(step.batch.request_ids)], step.parameters
        if parameters is None:
            return out, ran
        if key.samples:
            return pending(out, out, parameters.params), ran
        assert isinstance(self.sampler, TorchSampler)
        inputs = {name: step.batch.arrays[name][: len(out)] for name in ("input_ids", "source")}
        tensors = to_device(inputs, self.model.device)
        last_tokens = _known(tensors["input_ids"], tensors, self.graphs.previous)
        return self.sampler.launch(out, parameters, last_tokens), ran

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
                self._run_graph(key, inert(key, self.kv_specs), None)
        return self.stats.graphs_captured - before

    def collect(self, ticket: Ticket) -> StepOutput:
        sampled, step = ticket.finish(), ticket.step
        # One device computes one step at a time: it began this one when the one before was finished.
        started = max(step.submitted_at, self._finished_at)
        self._finished_at = self.clock.now() if ticket.finished_at is None else ticket.finished_at
        ids = [] if step.batch is None else step.batch.sampling_ids
        return StepOutput(
            dict(zip(ids, sampled.tokens, strict=True)),
            {i: report for i, report in zip(ids, sampled.logprobs, strict=True) if report is not None},
            started,
            self._finished_at,
            ticket.ran,
        )

    def close(self) -> None:
        """Lets the graphs go, and with them their memory; later steps would be eager."""
        if self.graphs is not None:
            self.graphs.recorder.forget()
            self.graphs = None


def _known(input_ids: Tensor, tensors: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
    """With the tokens of the step before in the place of those that the host did not know."""
    return input_ids if previous is None else torch.where(input_ids < 0, previous[tensors["source"]], input_ids)


def _of_sampler(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("sampling."): t for name, t in tensors.items() if name.startswith("sampling.")}
