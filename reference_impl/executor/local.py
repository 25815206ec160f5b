"""A worker: computes steps on one device, in the order in which they are submitted.

`submit` waits for nothing, so on a GPU the next step is planned and submitted while this one runs. Sampled tokens go
to the request's slot, where the next step reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.executor.batch import HostBatch, as_batch, lay_out
from reference_impl.executor.drafts import Verified, draft_arrays, guessed_before, propose, put_drafts, verify
from reference_impl.executor.graphs import GraphKey, Graphs, Recorder, inert, longest_bucket, padded
from reference_impl.executor.pages import LONGEST_WAIT, Pages
from reference_impl.executor.pooling import Pooled, Pools, add_pooled, launch_pools, of_sampling
from reference_impl.executor.scoring import Reports, add_scored, launch_scores
from reference_impl.executor.slots import Slot, Slots
from reference_impl.interfaces import (
    AttentionBackend,
    Batch,
    Clock,
    KVCache,
    KVSpec,
    LayeredPageStore,
    Masks,
    NamesKernels,
    PageStore,
    Proposer,
    Reply,
    Sampled,
    Sampler,
    Step,
    StepRow,
    TokenLogprobs,
    takes_bounds,
)
from reference_impl.models.decoder import Decoder
from reference_impl.sampling.masks import Allowed, check_mask, masked
from reference_impl.sampling.sampler import COLUMNS, Launched, Parameters, TorchSampler, launched, sample
from reference_impl.staging import Arrays, mark, to_device, to_host


@dataclass(frozen=True)
class Sampling:
    """What a step samples, on its way to the host."""

    rows: list[int]  # the rows of the step that sample, in the order of what `finish` gives
    accepted: Tensor | None  # on the host, of the rows that have drafts: how many of them were right
    finish: Callable[[], Sampled]  # waits for the device
    finished_at: float | None  # None: it may still run
    scores: Callable[[], Reports] | None = None
    pools: Callable[[], Pools] | None = None


@dataclass(frozen=True)
class Forward:
    """A step's forward pass. out: logits or, where a graph with this key samples, tokens."""

    host: HostBatch
    parameters: Parameters | None
    key: GraphKey | None
    out: Tensor
    tensors: Mapping[str, Tensor]
    # Of prompts; to be called when the device is done.
    scores: Callable[[], Reports] | None = None
    pools: Callable[[], Pools] | None = None


@dataclass
class Ticket:
    """A running step."""

    step: Step
    submitted_at: float
    ran: tuple[str, ...] = ()
    sampling: Sampling | None = None
    forward: Forward | None = None  # of a step that waits for its masks


@dataclass
class Stats:
    """Since the executor was made."""

    eager_steps: int = 0
    replayed_steps: int = 0
    graphs_captured: int = 0


class LocalExecutor:
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap.

    max_num_seqs: requests that run at a time. max_len: positions of one. proposer: whose drafts are verified where a
    step's rows have any; with one, and a sampler or an attention backend that needs lengths on the host, each step is
    waited for before the next is submitted. page_store: for the loads and saves of a step's transfers.
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
        proposer: Proposer | None = None,
        page_store: PageStore | LayeredPageStore | None = None,
    ):
        for spec in kv_specs:
            if spec.kind != "kv":
                raise ValueError(
                    f"LocalExecutor: expected KV groups of kind 'kv', whose blocks hold tokens, got {spec.kind!r}"
                )
        self.proposer = proposer
        self.pages = None if page_store is None else Pages(page_store, kv_cache)
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.kv_specs, self.clock, self.sampler = kv_specs, clock, sampler
        self._names_kernels = attention if isinstance(attention, NamesKernels) else None
        on_device = isinstance(sampler, TorchSampler) and sampler.captures
        self._reads_starts = proposer is not None and not (on_device and takes_bounds(attention))
        self.slots = Slots(max_num_seqs, max_len, kv_specs, model.device)
        self.graphs: Graphs | None = None
        self.stats = Stats()
        self._finished_at = -float("inf")  # the last step that was collected

    @property
    def max_in_flight(self) -> int:
        """2, unless the sampler is called, and waited for, at each step."""
        return 2 if isinstance(self.sampler, TorchSampler) else 1

    @torch.inference_mode()
    def submit(self, step: Step) -> Ticket:
        """Starts a step on the device."""
        now = self.clock.now()
        opened = self.slots.apply(step)
        if self.proposer is not None:
            for slot in step.closed:
                self.proposer.closed(slot)
            for new in opened:
                self.proposer.opened(new)
        self.kv_cache.transfer(step.transfers)
        if self.pages is not None:
            self.pages.begin(step.transfers)
            self.pages.take_in(0.0 if step.rows else LONGEST_WAIT)
        elif step.transfers.loads or step.transfers.saves:
            raise ValueError(
                f"step {step.step_id} loads or saves pages and this worker has no store: see Parts.page_store"
            )
        if not step.rows:
            return Ticket(step, now, sampling=self._on_its_way([], None, None))
        forward, ran = self._forward(step)
        if step.takes_masks:
            return Ticket(step, now, ran, forward=forward)
        return Ticket(step, now, ran, self._sample(forward, None))

    @torch.inference_mode()
    def finish(self, ticket: Ticket, masks: Masks) -> None:
        """ValueError if they are another step's, or are not masks; RuntimeError if the step waits for none."""
        step, forward = ticket.step, ticket.forward
        if forward is None:
            raise RuntimeError(f"step {step.step_id} waits for no masks: it was submitted without, or has them")
        if (masks.step_id, len(masks.rows)) != (step.step_id, len(step.rows)):
            raise ValueError(
                f"step {step.step_id} of {len(step.rows)} rows got masks of step {masks.step_id} for {len(masks.rows)}"
            )
        ticket.sampling, ticket.forward = self._sample(forward, masks), None

    def _forward(self, step: Step) -> tuple[Forward, tuple[str, ...]]:
        """Also returns which attention ran."""
        host = lay_out(self._from_their_starts(step) if self._reads_starts else step.rows, self.slots)
        if host.drafts:
            self._check_drafts(step)
            host.arrays.update(draft_arrays(host))
        parameters = self._parameters(host)
        key = None if self.graphs is None else self._graph_for(host, None if step.takes_masks else parameters)
        if key is not None:
            out, tensors, ran = self._replay(host, key)
            return Forward(host, parameters, key, out, tensors), ran
        scored = add_scored(host, self.slots) if self.slots.scored else None
        pooled = add_pooled(host, self.slots) if self.slots.pooled else None
        out, tensors, pools = self._compute(host, pooled)
        scores = None
        if scored is not None:
            scores = launch_scores(out, scored, self.slots)
            out = out[to_device({"sampling": scored.sampling}, out.device)["sampling"]]
        return Forward(host, parameters, key, out, tensors, scores, pools), self._ran()

    def _sample(self, forward: Forward, masks: Masks | None) -> Sampling:
        """Writes what the rows sample into their slots, and starts its copy to the host."""
        host, parameters, key, out, tensors = (
            forward.host, forward.parameters, forward.key, forward.out, forward.tensors,
        )  # fmt: skip
        allowed = None if masks is None else _allowed(masks, host, self.model.config.vocab_size)
        found: Launched | Sampled | None = None
        verified: Verified | None = None
        if key is not None and key.samples:
            assert parameters is not None
            found = launched(out, out, parameters.params)
            verified = verify(out, tensors, max(host.drafts)) if host.drafts else None
        elif parameters is not None:
            if allowed is not None:
                parameters = replace(parameters, allowed=allowed)
            found, verified = self._launch(out, parameters, tensors, host)
        elif host.sampling:
            found, verified = self._ask(out if allowed is None else masked(out, allowed), tensors, host)
        accepted = None if verified is None else verified.accepted
        self.slots.advance(tensors, accepted)
        rows = [host.order[place] for place in host.sampling]
        return self._on_its_way(rows, found, accepted, forward.scores, forward.pools)

    def _from_their_starts(self, step: Step) -> list[StepRow]:
        """The step's rows, beginning where their slots are: how many drafts of the step before were right is known
        here first."""
        starts = self.slots.computed[[row.slot for row in step.rows]].tolist()
        return [row._replace(start=start) for row, start in zip(step.rows, starts, strict=True)]

    def _check_drafts(self, step: Step) -> None:
        named = any(row.drafts for row in step.rows)
        if self.proposer is None and not named:
            raise ValueError(
                f"step {step.step_id} has rows with drafts; this worker has no proposer: see Parts.proposer"
            )
        vocab = self.model.config.vocab_size
        for row in step.rows:
            if row.num_drafts and not row.samples:
                raise ValueError(f"step {step.step_id}: a row of slot {row.slot} has drafts and does not sample")
            if named and len(row.drafts) != row.num_drafts:
                raise ValueError(f"step {step.step_id}: a row has {row.num_drafts} drafts and names {len(row.drafts)}")
            for token in row.drafts:
                if not 0 <= token < vocab:
                    name = self.slots.host[row.slot].id
                    raise ValueError(
                        f"a draft for request {name!r} is token {token}, outside the vocabulary [0, {vocab})"
                    )

    def _compute(
        self, host: HostBatch, pooled: Pooled | None
    ) -> tuple[Tensor, Mapping[str, Tensor], Callable[[], Pools] | None]:
        """The logits that are needed; the arrays on the device; what is pooled."""
        self.stats.eager_steps += 1
        tensors = to_device(host.arrays, self.model.device)
        if host.drafts:
            self._draft(host, tensors)
        batch = self._batch(host, tensors)
        if pooled is None:
            return self.model(batch, self.kv_cache, self.attention), tensors, None
        hidden = self.model.hidden_states(batch, self.kv_cache, self.attention)
        pools = launch_pools(hidden, pooled)
        return self.model.logits(of_sampling(hidden, pooled)), tensors, pools

    def _draft(self, host: HostBatch, tensors: dict[str, Tensor]) -> None:
        """Puts the drafts of the step's rows behind their known tokens."""
        if not host.given:
            assert self.proposer is not None
            vocab = self.model.config.vocab_size
            tensors["draft.tokens"] = propose(self.proposer, self.slots, tensors, max(host.drafts), vocab)
        put_drafts(self.slots, tensors)

    def _batch(self, host: HostBatch, tensors: Mapping[str, Tensor]) -> Batch:
        found = self.slots.look_up(tensors, max(host.context_lens))
        return as_batch(host, {**tensors, **found}, self.kv_specs)

    # --- sampling -------------------------------------------------------------------------------------------------

    def _parameters(self, host: HostBatch) -> Parameters | None:
        """For a sampler that is launched; its arrays are then copied with the batch's. None also if no row samples."""
        if not host.sampling or not isinstance(self.sampler, TorchSampler):
            return None
        places, lengths = _of_logits(host)
        parameters = self.slots.parameters([host.slots[at] for at in places], lengths)
        if self.sampler.captures:
            host.arrays.update({f"sampling.{name}": parameters.arrays[name] for name in COLUMNS})
        return parameters

    def _launch(
        self, logits: Tensor, parameters: Parameters, tensors: Mapping[str, Tensor], host: HostBatch
    ) -> tuple[Launched, Verified | None]:
        assert isinstance(self.sampler, TorchSampler)
        penalties = parameters.penalties
        if penalties is not None and host.drafts:
            penalties = replace(penalties, guessed=guessed_before(penalties, host, tensors))
            parameters = replace(parameters, penalties=penalties)
        on_device = self._of_sampler(tensors, parameters, len(logits)) if self.sampler.captures else None
        found = self.sampler.launch(logits, parameters, on_device)
        self.slots.put(tensors, found.tokens)
        verified = verify(found.tokens, tensors, max(host.drafts)) if host.drafts else None
        if penalties is not None:
            holds = [self.slots.host[host.slots[at]].holds for at in _of_logits(host)[0]]
            self.slots.counts.add(penalties, found.tokens, holds, None if verified is None else verified.kept)
        return found, verified

    def _ask(self, logits: Tensor, tensors: Mapping[str, Tensor], host: HostBatch) -> tuple[Sampled, Verified | None]:
        """A sampler that is asked, and waited for: it sees the requests' tokens, so that they are kept up to date."""
        asking = [self.slots.host[host.slots[at]] for at in _of_logits(host)[0]]
        if not host.drafts:
            sampled = self.sampler(logits, asking)
        else:
            sampled = self.sampler(logits, self._with_drafts(host, tensors["draft.tokens"].tolist()))
        chosen = to_device({"tokens": np.array(sampled.tokens, np.int64)}, self.model.device)["tokens"]
        self.slots.put(tensors, chosen)
        verified = verify(chosen, tensors, max(host.drafts)) if host.drafts else None
        kept = [True] * len(asking) if verified is None else verified.kept.tolist()
        for slot, token, is_kept in zip(asking, sampled.tokens, kept, strict=True):
            if is_kept and not slot.holds:
                slot.tokens.append(token)
        return sampled, verified

    def _with_drafts(self, host: HostBatch, drafts: list[int]) -> list[Slot]:
        """Of each of the logits its request, as it is if the drafts before are right."""
        asking, end = [], 0
        for at in host.sampling:
            slot, mine = self.slots.host[host.slots[at]], drafts[end : end + host.drafts[at]]
            asking += [replace(slot, tokens=slot.tokens + mine[:i]) for i in range(len(mine) + 1)]
            end += len(mine)
        return asking

    def _of_sampler(
        self, tensors: Mapping[str, Tensor], parameters: Parameters | None = None, num: int | None = None
    ) -> dict[str, Tensor]:
        """What a sampler that `captures` chooses by, of the first `num` logits. How many tokens a request has is looked
        up: the host may not have it yet. parameters: where a replay gave logits, whose graph does not take columns."""
        if "sampling.seed" in tensors:
            found = {name: tensors[f"sampling.{name}"] for name in COLUMNS}
        else:
            assert parameters is not None
            found = to_device({name: parameters.arrays[name] for name in COLUMNS}, self.model.device)
        return {**found, "position": self.slots.behind(tensors)[1][:num]}

    def _ran(self) -> tuple[str, ...]:
        return () if self._names_kernels is None else tuple(sorted(self._names_kernels.ran))

    def _on_its_way(
        self,
        rows: list[int],
        found: Launched | Sampled | None,
        accepted: Tensor | None,
        scores: Callable[[], Reports] | None = None,
        pools: Callable[[], Pools] | None = None,
    ) -> Sampling:
        device = self.model.device
        finished_at = self.clock.now() if device.type == "cpu" or isinstance(found, Sampled) else None
        if accepted is not None:
            accepted = to_host(accepted)
        if isinstance(found, Launched) and accepted is None:
            finish = found.finish
        else:
            wait, sampled = mark(device), found or Sampled([], [])
            finish = lambda: (wait(), sampled.finish() if isinstance(sampled, Launched) else sampled)[1]  # noqa: E731
        return Sampling(rows, accepted, finish, finished_at, scores, pools)

    # --- CUDA graphs ----------------------------------------------------------------------------------------------

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int, num_drafts: int = 0) -> None:
        """From now on steps in which all rows decode are replayed. max_rows: requests that run at a time; max_len:
        positions of one; num_drafts: that a row usually has. Needs attention that takes bounds of lengths, and a cache
        write that skips negative slots: that of the fused path (writes_and_attends).
        """
        this = weakref.proxy(self)  # in a cycle, weights and cache would live until the garbage collector runs
        self.graphs = Graphs(
            lambda *given: this._captured(*given), lambda: this._ran(), self.slots.num_slots, max_rows, max_len,
            self.model.device, recorder, num_drafts=num_drafts,
        )  # fmt: skip

    def _captured(self, host: HostBatch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        logits: Tensor = self.model(self._batch(host, tensors), self.kv_cache, self.attention)
        if not samples:
            return logits
        assert isinstance(self.sampler, TorchSampler)
        tokens = self.sampler.choose(logits, None, self._of_sampler(tensors))
        self.slots.put(tensors, tokens)
        return tokens

    def _run_graph(self, key: GraphKey, host_arrays: Arrays) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        assert self.graphs is not None
        if key not in self.graphs:
            with self.graphs.recorder.launches():
                model: Any = self.model  # a FusedDecoder: only its steps are replayed
                model.tune(key.num_tokens)  # measures which kernels suit so many
            self.stats.graphs_captured += 1
        return self.graphs.run(key, host_arrays)

    def _graph_for(self, host: HostBatch, parameters: Parameters | None) -> GraphKey | None:
        if self.model.watched:
            return None
        assert self.graphs is not None
        samples = parameters is not None and not parameters.needs_logits
        return self.graphs.key(host, samples and isinstance(self.sampler, TorchSampler) and self.sampler.captures)

    def _replay(self, host: HostBatch, key: GraphKey) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        """As `_compute`; tokens instead of logits, where the key samples."""
        self.stats.replayed_steps += 1
        drafts: dict[str, Tensor] = {}
        if host.drafts:
            mine = {name: array for name, array in host.arrays.items() if name.startswith("draft.")}
            drafts = to_device(mine, self.model.device)
            self._draft(host, drafts)
        out, tensors, ran = self._run_graph(key, padded(host.arrays, key, self.slots.num_slots))
        return out[: len(host.sampling) + sum(host.drafts)], {**tensors, **drafts}, ran

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        """Captures every graph that sampling without penalties and log-probabilities may need, for contexts of up to
        `longest` positions: seconds that each would otherwise cost at its first use. Returns how many.

        RuntimeError while the model is watched: a graph would replay the observer's work."""
        if self.graphs is None:
            return 0
        if self.model.watched:
            raise RuntimeError("capture_all: expected a model that is not watched; capture after `watching` ends")
        before, bound = self.stats.graphs_captured, self.graphs.max_len
        if longest is not None:
            bound = longest_bucket(longest, self.graphs.max_len)
        samples = isinstance(self.sampler, TorchSampler) and self.sampler.captures
        for key in self.graphs.keys(samples):
            if key.longest <= bound:
                self._run_graph(key, inert(key, self.slots.num_slots))
        return self.stats.graphs_captured - before

    def collect(self, ticket: Ticket) -> Reply:
        step, sampling = ticket.step, ticket.sampling
        if sampling is None:
            raise RuntimeError(f"step {step.step_id} was submitted with takes_masks: call finish before collect")
        sampled = sampling.finish()
        # One device computes one step at a time: it began this one when the one before was finished.
        started = max(ticket.submitted_at, self._finished_at)
        self._finished_at = self.clock.now() if sampling.finished_at is None else sampling.finished_at
        ended = () if self.pages is None else self.pages.take_ended()
        moved = {} if self.pages is None else self.pages.take_moved()
        scores = {} if sampling.scores is None else sampling.scores()
        pools = {} if sampling.pools is None else sampling.pools()
        tokens, logprobs = _per_row(step, sampling, sampled)
        return Reply(
            step.step_id, tokens, logprobs, started, self._finished_at, ticket.ran, scores, pools, ended, moved
        )

    def close(self) -> None:
        """Frees the graphs and their memory; later steps run eagerly."""
        if self.graphs is not None:
            self.graphs.recorder.forget()
            self.graphs = None


def _per_row(
    step: Step, sampling: Sampling, sampled: Sampled
) -> tuple[tuple[tuple[int, ...], ...], dict[int, tuple[TokenLogprobs, ...]]]:
    """Tokens and log-probabilities as of `Reply`."""
    tokens: list[tuple[int, ...]] = [()] * len(step.rows)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    if sampling.accepted is None:
        for row, token, report in zip(sampling.rows, sampled.tokens, sampled.logprobs, strict=True):
            tokens[row] = (token,)
            if report is not None:
                logprobs[row] = (report,)
        return tuple(tokens), logprobs
    accepted, first = iter(sampling.accepted.tolist()), 0
    for row in sampling.rows:
        drafts = step.rows[row].num_drafts
        num = 1 + (next(accepted) if drafts else 0)
        tokens[row] = tuple(sampled.tokens[first : first + num])
        reports = sampled.logprobs[first : first + num]
        if reports[0] is not None:
            logprobs[row] = tuple(report for report in reports if report is not None)
        first += drafts + 1
    return tuple(tokens), logprobs


def _of_logits(host: HostBatch) -> tuple[Sequence[int], list[int]]:
    """Of each of the logits its row, and how many tokens the row's request has there."""
    if not host.drafts:
        return host.sampling, [host.context_lens[at] for at in host.sampling]
    places = [(at, left) for at in host.sampling for left in range(host.drafts[at], -1, -1)]
    return [at for at, _ in places], [host.context_lens[at] - left for at, left in places]


def _allowed(masks: Masks, host: HostBatch, vocab_size: int) -> Allowed:
    """Masks come for each row of the step, and are needed for each of the logits."""
    rows, found = [], []
    for place, at in enumerate(_of_logits(host)[0]):
        mask = masks.rows[host.order[at]]
        if mask is not None:
            check_mask(mask, vocab_size, host.request_ids[at])
            rows.append(place)
            found.append(mask)
    return Allowed(rows, found)
