"""A worker that verifies guesses: a proposer's of its own, or those that a step's rows name (Leviathan et al. 2023).

Extends `StepRun.stage` (what guesses are looked up by), `compute` (guesses lie behind the known tokens before the model
runs), `choose` (what requests without a seed have at their guesses is drawn by rejection) and `take` (of the guesses,
those are kept that are what was chosen there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.batch import lay_out
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import mark, to_host
from reference_impl.core.worker import NO_TOKEN, StepRun, Worker
from reference_impl.features.grammars.guesses import AskMasks, Guessed, GuessesLater
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.speculative.candidates import typical
from reference_impl.features.speculative.drafts import Verified, draft_arrays, propose, put_drafts, verify
from reference_impl.features.speculative.rejection import filtered, is_exact, rejection_arrays, verified
from reference_impl.interfaces import AttentionBackend, Opened, Proposer, Step, StepRow, takes_bounds


class _Told:
    """A proposer is told of requests as `Slots` follows them."""

    def __init__(self, proposer: Proposer):
        self.proposer = proposer

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        for slot in step.closed:
            self.proposer.closed(slot)
        for new in opened:
            self.proposer.opened(new)


class DraftWorker(Worker):
    """proposer: whose drafts are verified where a step's rows have any; with one, and a sampler or an attention backend
    that needs lengths on the host, each step is waited for before the next is submitted."""

    def __init__(self, *args: Any, proposer: Proposer | None = None, **options: Any):
        super().__init__(*args, **options)
        self.proposer = proposer
        self.has_bounds = proposer is not None and self.needs_lengths(self.attention)
        self.drafted_in = -self.max_in_flight  # the last step with drafts
        if proposer is not None:
            self.slots.followers.append(_Told(proposer))

    ask_masks: AskMasks | None = None  # while a step that `GuessesLater` is computed
    # Whether guesses are kept by `candidates.typical`, which is lossy, in place of `verify` and `rejection.verified`.
    typical = False

    @property
    def makes_drafts(self) -> bool:
        """Otherwise they come with the steps."""
        return self.proposer is not None

    def reads_starts(self, step: Step) -> bool:
        """Whether the step's rows may begin before where it says, which the host must know: it may have been planned
        before it was known how many drafts of the last steps were right."""
        return self.has_bounds and step.step_id <= self.drafted_in + self.max_in_flight

    @torch.inference_mode()
    def guesses(self, run: StepRun, ask: AskMasks) -> Sequence[Guessed]:
        """As of `grammars.guesses.ShowsGuesses`."""
        if isinstance(run, DraftRun) and isinstance(run.step, GuessesLater) and run.guessed_tokens is None:
            self.ask_masks = ask
            try:
                run.stage()
                run.compute()
            finally:
                self.ask_masks = None
        found = [Guessed()] * len(run.step.rows)
        if isinstance(run, DraftRun) and run.guessed_tokens is not None:
            on_host, wait = run.guessed_tokens
            wait()
            drafted = [row for row, num in enumerate(run.batch.drafts) if num]
            guesses = on_host.split([run.batch.drafts[row] for row in drafted])
            for row, tokens, parents in zip(drafted, guesses, run.parents(), strict=True):
                found[run.batch.order[row]] = Guessed(tokens.tolist(), parents)
        return found

    def needs_lengths(self, *attention: AttentionBackend) -> bool:
        """Whether the sampler or one of these needs them on the host."""
        s = self.sampler
        on_device = isinstance(s, TorchSampler) and (s.captures or isinstance(s, GumbelSampler))
        return not (on_device and all(map(takes_bounds, attention)))


class DraftRun(StepRun):
    worker: DraftWorker
    rows: Sequence[StepRow]  # the step's, as far as is known on the host where they begin
    accepted: Tensor  # of rows with drafts, how many are kept
    # Of a step that waits for masks: the D guesses, [D] on the host when the function is called that waits for them.
    guessed_tokens: tuple[Tensor, Callable[[], None]] | None = None
    q: Tensor | None = None  # [E, vocab_size]: what the guesses of `rejection_arrays` were drawn from; None: not drawn

    def stage(self) -> None:
        self.rows = self.step.rows
        if self.worker.reads_starts(self.step):
            starts = self._starts()
            if starts != [row.start for row in self.rows]:
                self.rows = [row._replace(start=start) for row, start in zip(self.rows, starts, strict=True)]
                self.batch = lay_out(self.rows, self.worker.slots)
        if self.batch.drafts:
            self.worker.drafted_in = self.step.step_id
        self.add_arrays()
        super().stage()

    def add_arrays(self) -> None:
        """To those of the batch, what guesses are looked up by."""
        if self.batch.drafts:
            self._check()
            self.batch.arrays.update(draft_arrays(self.batch, self.step))
            if is_exact(self.worker.sampler) and not self.worker.typical:
                self.batch.arrays.update(rejection_arrays(self.batch, self.worker.slots.host, self.step.step_id))

    def _starts(self) -> list[int]:
        """Where the slots of the step's rows are: how many drafts of the step before were right is known here first."""
        found: list[int] = self.worker.slots.computed[[row.slot for row in self.step.rows]].tolist()
        return found

    def _check(self) -> None:
        rows: Sequence[StepRow] = self.step.rows
        named = any(row.drafts for row in rows)
        number, vocab = self.step.step_id, self.worker.model.config.vocab_size
        if not (named or self.worker.makes_drafts):
            raise ValueError(f"step {number} has rows with drafts; this worker has no proposer: see Parts.proposer")
        for row in rows:
            if row.num_drafts and not row.samples:
                raise ValueError(f"step {number}: a row of slot {row.slot} has drafts and does not sample")
            if named and len(row.drafts) != row.num_drafts:
                raise ValueError(f"step {number}: a row has {row.num_drafts} drafts and names {len(row.drafts)}")
            for token in row.drafts:
                if not 0 <= token < vocab:
                    name = self.worker.slots.host[row.slot].request_id
                    raise ValueError(
                        f"a draft for request {name!r} is token {token}, outside the vocabulary [0, {vocab})"
                    )

    def compute(self) -> None:
        w = self.worker
        if self.batch.drafts:
            if "draft.tokens" not in self.tensors:
                assert w.proposer is not None
                k, vocab = max(self.batch.drafts), w.model.config.vocab_size
                longest = max(self.batch.context_lens)
                self.tensors["draft.tokens"] = propose(w.proposer, w.slots, self.tensors, k, vocab, longest)
            put_drafts(w.slots, self.tensors)
        self.show_guesses()
        super().compute()

    def show_guesses(self) -> None:
        """Guesses start on their way to the host, before the model is launched, if masks depend on them."""
        if self.batch.drafts and self.step.takes_masks and self.guessed_tokens is None:
            self.guessed_tokens = to_host(self.tensors["draft.tokens"]), mark(self.worker.model.device)

    def parents(self) -> Sequence[Sequence[int]]:
        """Of each row with guesses, as of `Guessed`."""
        return [tuple(range(-1, num - 1)) for num in self.batch.drafts if num]

    def own_logits(self) -> NDArray[np.int64]:
        """[D]: of each guess which of the logits stand behind it."""
        return self.batch.arrays["draft.at"] + 1

    def choose(self) -> Tensor:
        tokens, t = super().choose(), self.tensors
        if self.worker.typical and self.batch.drafts and "temperature" in t:  # otherwise all rows are greedy
            guesses, at = t["draft.tokens"], t["draft.at"]
            kept = typical(filtered(self.scores, t, at), guesses)
            return tokens.index_copy(0, at, torch.where(kept, guesses, tokens[at]))
        if "draft.unseeded" not in t:
            return tokens
        at = t["draft.at"][t["draft.unseeded"]]
        p, guesses = filtered(self.scores, t, at), t["draft.tokens"][t["draft.unseeded"]]
        return tokens.index_copy(0, at, verified(p, self.q, guesses, t["draft.verdicts"]))

    def take(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        if not self.batch.drafts:
            return super().take(tokens, kept)
        t, verified = self.tensors, self.verify(tokens)
        self.accepted = verified.accepted
        # The rows' lengths count all drafts as right.
        self.worker.slots.computed.index_add_(0, t["draft.slots"], verified.accepted - t["draft.num"])
        super().take(tokens, verified.kept)

    def verify(self, tokens: Tensor) -> Verified:
        """tokens [logits]: what was chosen there."""
        t: Mapping[str, Tensor] = self.tensors
        if "draft.cut" in t:  # as of `masked.py`
            t = {**t, "draft.tokens": t["draft.tokens"].masked_fill(t["draft.cut"], NO_TOKEN)}
        return verify(tokens, t, max(self.batch.drafts))
