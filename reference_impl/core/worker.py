"""A worker: computes steps on one device, in the order in which they are submitted.

`submit` waits for nothing, so on a GPU the next step is planned and submitted while this one runs. Sampled tokens go
to the request's slot, where the next step reads them; `collect` waits for a step, and gives its reply.

    submit:   slots.apply -> lay_out -> stage (host to device) -> compute (the model) -> end (sample, device to host)
    collect:  wait -> reply

What a worker does besides are its features (worker_feature.py), of which a plain step needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.batch import HostBatch, as_batch, lay_out
from reference_impl.core.decoder import Decoder
from reference_impl.core.hooks import Hooks
from reference_impl.core.sampler import TorchSampler, report
from reference_impl.core.slots import Slots
from reference_impl.core.staging import mark
from reference_impl.core.worker_feature import StepPart, WorkerFeature
from reference_impl.interfaces import (
    AttentionBackend,
    Clock,
    KVCache,
    KVSpec,
    NamesKernels,
    Reply,
    Step,
    TokenLogprobs,
)

NO_TOKEN = -1  # stands for what is sampled from logits that are not numbers


def not_finite(logits: Tensor) -> Tensor:
    """Whether each row of logits [rows, vocab_size] has a NaN or an infinite number, [rows] bool. Without, its sum
    times 0 is 0."""
    return logits.sum(-1, dtype=torch.float32) * 0 != 0


class Worker:
    """One model on one device. max_num_seqs: requests that run at a time. max_len: positions of one. ValueError for a
    KV group whose kind is not "kv"."""

    # Sampled tokens stay on the device, so a step can be submitted before the one before it is collected.
    max_in_flight = 2

    def __init__(
        self, model: Decoder, kv_cache: KVCache, attention: AttentionBackend, kv_specs: Sequence[KVSpec], clock: Clock,
        sampler: TorchSampler, *, max_num_seqs: int, max_len: int,
    ):  # fmt: skip
        for spec in kv_specs:
            if spec.kind != "kv":
                name = type(self).__name__
                raise ValueError(
                    f"{name}: expected KV groups of kind 'kv', whose blocks hold tokens, got {spec.kind!r}"
                )
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.kv_specs, self.clock, self.sampler = kv_specs, clock, sampler
        self.names_kernels = attention if isinstance(attention, NamesKernels) else None
        self.slots = Slots(max_num_seqs, max_len, kv_specs, model.device)
        self.hooks, self.run_kind = Hooks(WorkerFeature), StepRun
        self.slots.followers = self.hooks["follow"]
        self._finished_at = -float("inf")  # the last step that was collected

    @property
    def reads(self) -> Collection[str]:
        """The fields of SamplingParams that the sampler reads; see `ReadsFields`."""
        return self.sampler.reads

    @torch.inference_mode()
    def submit(self, step: Step) -> StepRun:
        """Starts a step on the device. ValueError for a slot that does not exist, or pages without a store."""
        now = self.clock.now()
        self.slots.apply(step)
        moves = step.transfers
        if moves.swap_out or moves.copies or moves.swap_in:
            self.kv_cache.transfer(moves)
            for move_blocks in self.hooks["move_blocks"]:
                move_blocks(moves)
        if (moves.loads or moves.saves) and not self.hooks["move_pages"]:
            raise ValueError(
                f"step {step.step_id} loads or saves pages and this worker has no store: see Parts.page_store"
            )
        for move_pages in self.hooks["move_pages"]:
            move_pages(step)
        run = self.run_kind(self, step, lay_out(step.rows, self.slots), now, self.model, self.sampler)
        slots, asks_all = run.batch.slots, run.batch.drafts or step.takes_masks
        needed = [f for f in self.hooks.features if asks_all or f.every_step or not f.slots.isdisjoint(slots)]
        run.parts = [part for feature in needed if (part := feature.part(run)) is not None]
        if step.rows and not any(part.starts_later for part in run.parts):
            run.start()
        run.end()
        return run

    def collect(self, run: StepRun) -> Reply:
        """Waits for the step and gives its reply. RuntimeError if it still waits for masks."""
        if run.waits:
            raise RuntimeError(f"step {run.step.step_id} was submitted with takes_masks: call finish before collect")
        if run.wait is not None:
            run.wait()
        # One device computes one step at a time: it began this one when the one before was finished.
        started = max(run.submitted_at, self._finished_at)
        self._finished_at = self.clock.now() if run.finished_at is None else run.finished_at
        reply = run.reply(started, self._finished_at)
        for collected in self.hooks["collected"]:
            reply = collected(reply)
        return reply

    def explain(self, step: Step, at: int) -> str:
        """Why nothing could be sampled for a row of a step."""
        return "; ".join(["its logits are not all finite numbers", *(more(step, at) for more in self.hooks["explain"])])

    def close(self) -> None:
        for close in self.hooks["close"]:
            close()


@dataclass(eq=False)
class StepRun:
    """A step on its way through a worker, and the worker's ticket for it."""

    worker: Worker
    step: Step
    batch: HostBatch
    submitted_at: float
    model: Any  # what computes the step, and what chooses its tokens: the worker's, or a part's in front of it
    sampler: TorchSampler
    parts: Sequence[StepPart] = ()
    waits: bool = False  # before it samples
    finished_at: float | None = None  # None: it may still run
    wait: Callable[[], None] | None = None  # for the device; None: there is nothing to wait for
    ran: tuple[str, ...] = ()  # what computed attention
    replayed: bool = False  # as a graph: what was looked up then lies where other graphs put theirs, too
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the batch's arrays, and what was looked up by them
    logits: Tensor = field(init=False)  # [logits, vocab_size]
    scores: Tensor = field(init=False)  # the same shape: logits as the parts moved them, which tokens are drawn from
    # [logits], on the host when the device is done: what was sampled, and which of it follows from the tokens before
    # (None: all).
    tokens: Tensor | None = None
    kept: Tensor | None = None
    broken: Tensor | None = None  # [logits] bool, on the device: which of them are not all numbers
    # To be called when the device is done: log-probabilities of the tokens; further fields of the reply.
    read_logprobs: Callable[[], list[TokenLogprobs | None]] | None = None
    reports: dict[str, Callable[[], Any]] = field(default_factory=dict)
    # What parts tell each other. (run, some of the logits [P]) -> the drafts before them, as pairs (which of the P,
    # token), or None; and of masks: which of the logits have one, and of each row of the batch whether it has any.
    drafts_before: Callable[[StepRun, NDArray[np.int64]], tuple[Tensor, Tensor] | None] | None = None
    masked: tuple[Sequence[int], Sequence[bool]] | None = None

    def start(self) -> None:
        """Launches what needs no token that is sampled here."""
        for part in self.parts:
            part.lay_out(self)
        self.stage()
        for part in self.parts:
            part.before_model(self)
        self.compute()
        for part in self.parts:
            part.after_model(self)

    def stage(self) -> None:
        """Copies to the device what the host knows of the rows, in one piece."""
        batch = self.batch
        batch.arrays.update(self.sampler.columns(batch.settings, batch.lengths))
        self.tensors = batch.on(self.worker.model.device)

    def compute(self) -> None:
        """Runs the forward pass: sets the logits, and what computed attention."""
        w = self.worker
        self.tensors |= w.slots.look_up(self.tensors, max(self.batch.context_lens))
        batch = as_batch(self.batch, self.tensors, w.kv_specs)
        self.logits = self.scores = self.model(batch, w.kv_cache, w.attention)
        self.ran = () if w.names_kernels is None else tuple(sorted(w.names_kernels.ran))

    def sample(self) -> None:
        """Chooses a token at each of the logits, and puts it where the next step finds it."""
        for part in self.parts:
            part.move_scores(self)
        tokens = self.sampler.choose(self.scores, self.tensors)
        for part in self.parts:
            tokens = part.chosen(self, tokens)
        self.worker.slots.put(self.tensors, tokens)
        self.broken = not_finite(self.logits)
        wanted = self.batch.settings["logprobs"]
        if wanted.max() >= 0 and self.read_logprobs is None:
            self.read_logprobs = report(self.logits, tokens, wanted)
        self.take(tokens)

    def take(self, tokens: Tensor) -> None:
        """Verifies what was sampled and starts to copy it to the host."""
        for part in self.parts:
            part.verify(self, tokens)
        sent = tokens if self.broken is None else tokens.masked_fill(self.broken, NO_TOKEN)
        self.tokens = sent.to("cpu", non_blocking=True, copy=True)
        for part in self.parts:
            part.taken(self, tokens)
        if self.kept is not None:
            self.kept = self.kept.to("cpu", non_blocking=True, copy=True)

    def end(self) -> None:
        """Samples, if any row does, and adds the rows' lengths to the slots; does nothing yet if a part waits."""
        w = self.worker
        self.waits = any(part.waits(self) for part in self.parts)
        if self.waits:
            return
        if self.batch.sampling:
            self.sample()
        for part in self.parts:
            part.ended(self)
        if self.step.rows:
            w.slots.advance(self.tensors)
            del self.logits, self.scores, self.tensors  # a later step may have their memory
        if w.model.device.type == "cpu":
            self.wait, self.finished_at = None, w.clock.now()
        else:
            self.wait = mark(w.model.device)

    def reply(self, started_at: float, finished_at: float) -> Reply:
        """The worker's reply; to be called when the device is done. Times in seconds on the engine's clock."""
        tokens: list[tuple[int, ...]] = [()] * len(self.step.rows)
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        if self.tokens is not None:
            rows = [self.batch.order[row] for row in self.batch.sampling]
            kept = None if self.kept is None else self.kept.tolist()
            sampled = zip(rows, self.tokens.tolist(), strict=True)
            for row, token in sampled if kept is None else compress(sampled, kept):
                tokens[row] += (max(token, 0),)
                if token == NO_TOKEN:
                    errors[row] = self.worker.explain(self.step, row)
            if self.read_logprobs is not None:
                reports = zip(rows, self.read_logprobs(), strict=True)
                for row, found in reports if kept is None else compress(reports, kept):
                    if found is not None:
                        logprobs[row] = (*logprobs.get(row, ()), found)
        more = {"errors": errors, **{name: read() for name, read in self.reports.items()}}
        return Reply(self.step.step_id, tuple(tokens), logprobs, started_at, finished_at, self.ran, **more)
