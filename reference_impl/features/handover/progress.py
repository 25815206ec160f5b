"""A request in mid-answer goes on in another engine: what it takes along, and how the other one takes it up.

    there   handover = hand_over(request)    before it is aborted; or who streams it notes its tokens: `Progress.after`
    here    engine.add(handover.prompt, handover.sampling, resume=handover.progress)

As after a preemption its tokens are known and none is computed, and all that decides the next one follows from them:
penalties, min_tokens and grammars from the tokens, random numbers from seed, sample and position. So the text goes on
as it would have without a hand-over. Drafts begin anew.

Tokens in flight stay behind: they were not reported, and are sampled once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import urandom

from reference_impl.interfaces import Request, RequestState, SamplingParams, TokenLogprobs
from reference_impl.interfaces.sampling_fields import MOST_SAMPLES


@dataclass(frozen=True)
class Progress:
    """How far an answer has come.

    seed: given, or drawn when the request was new: 64 bits. tokens: the output so far. sample_index: which sample of
    its prompt; each goes on by itself. num_unstreamed: how many of the last tokens were not shown yet, so that the text
    goes on with them. has_grammar: it has a grammar besides `bad_words`, which has to be given again (a grammar reads
    the output, so it goes on where it was). logprobs: one for each token, where they are asked for. prompt_logprobs:
    likewise, one for each token of the prompt but the first; without them the prompt is computed and scored anew.
    """

    seed: int
    tokens: tuple[int, ...] = ()
    sample_index: int = 0
    num_unstreamed: int = 0
    has_grammar: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def after(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Progress:
        """The progress when these tokens, too, have come and were shown."""
        both = (*self.tokens, *tokens), (*self.logprobs, *logprobs)
        return replace(self, tokens=both[0], logprobs=both[1], num_unstreamed=0)


@dataclass(frozen=True)
class Handover:
    """One sample of a prompt, in mid-answer: all that `Engine.add` needs, but for the options that are not part of the
    answer (cache_salt, priority, tenant, deadline, grammar). sampling.n is 1."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    progress: Progress

    def __post_init__(self) -> None:
        if self.sampling.n != 1:
            n = self.sampling.n
            raise ValueError(f"a hand-over is of one sample, which goes on by itself: expected n=1, got n={n}")


def new_handover(prompt: Sequence[int], sampling: SamplingParams, has_grammar: bool = False) -> Handover:
    """A request of which nothing is generated yet, for one who notes its progress: its seed is known, and so any engine
    can go on with it. ValueError for several samples, of which each is a request of its own."""
    seed = int.from_bytes(urandom(8), "big") if sampling.seed is None else sampling.seed
    return Handover(tuple(prompt), sampling, Progress(seed, has_grammar=has_grammar))


def hand_over(request: Request, num_unstreamed: int = 0) -> Handover:
    """The request as it is now; its engine keeps it until it is aborted there. Samples that are not forked yet are
    handed over one by one. ValueError for what does not go on elsewhere, and for a finished request."""
    _check_kind(request)
    if request.state is RequestState.FINISHED:
        raise ValueError(f"request {request.id!r} is finished ({request.finish_reason}): nothing is left to hand over")
    tokens = tuple(request.output_tokens)
    progress = Progress(
        request.seed, tokens, request.sample_index, num_unstreamed,
        has_grammar=request.grammar is not None and not request.sampling.bad_words,
        logprobs=tuple(request.logprobs),
        # Before the first token some may be missing; then the prompt is scored anew.
        prompt_logprobs=tuple(request.prompt_logprobs) if tokens else (),
    )  # fmt: skip
    prompt = tuple(request.tokens[: request.num_prompt_tokens])
    return Handover(prompt, replace(request.sampling, n=1), progress)


def take_up(request: Request, progress: Progress, vocab_size: int, verifies_drafts: bool) -> None:
    """Makes a new request, which is not queued yet, go on behind the tokens of `progress`. ValueError, and nothing is
    changed, where it cannot. verifies_drafts: whether its engine does."""
    _check_kind(request)
    _check(request, progress, vocab_size)
    request.tokens += progress.tokens
    request.num_resumed_tokens = len(progress.tokens)
    request.seed, request.sample_index = progress.seed, progress.sample_index
    request.logprobs += progress.logprobs
    request.prompt_logprobs += progress.prompt_logprobs
    if verifies_drafts and progress.tokens and request.sampling.seed is None:
        # The numbers of verdicts on drafts are counted by steps (`speculative/rejection.py`), and this engine's have
        # the numbers of steps that decided the text so far. Such a text is promised its distribution, not its tokens.
        text = f"{progress.seed} {len(progress.tokens)}"
        request.seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _check_kind(request: Request) -> None:
    if request.pooling is not None:
        raise ValueError(f"request {request.id!r} has no answer that could go on elsewhere: it is pooled. Send it anew")
    if request.holds:
        raise ValueError(f"request {request.id!r} is held (beam search): what chooses its tokens does not go elsewhere")


def _check(request: Request, progress: Progress, vocab_size: int) -> None:
    """Raises ValueError unless the request can go on with this progress in an engine of so many token ids."""
    sampling, tokens, num_tokens = request.sampling, progress.tokens, len(progress.tokens)
    if sampling.n != 1:
        raise ValueError(f"resume: expected SamplingParams(n=1), since each sample goes on by itself; got {sampling.n}")
    for name, most in (("seed", 2**64 - 1), ("sample_index", MOST_SAMPLES - 1), ("num_unstreamed", num_tokens)):
        given = getattr(progress, name)
        if type(given) is not int or not 0 <= given <= most:
            raise ValueError(f"resume: {name}: expected a whole number from 0 to {most}, got {given!r}")
    if sampling.seed not in (None, progress.seed):
        raise ValueError(f"resume: expected the seed of sampling, {sampling.seed}, got {progress.seed}")
    if progress.has_grammar != (request.grammar is not None and not sampling.bad_words):
        had, got = ("a", "none") if progress.has_grammar else ("no", "one")
        raise ValueError(f"resume: the request had {had} grammar where it comes from, and was given {got} here")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"resume: tokens: expected ids of the vocabulary [0, {vocab_size}), got {token!r}")
        if token in request.stop_token_ids:
            raise ValueError(f"resume: token {token} ends the answer: nothing is left to generate")
    if request.num_prompt_tokens + num_tokens >= request.max_total_tokens:
        raise ValueError(
            f"resume: the request has {request.num_prompt_tokens} tokens of prompt and {num_tokens} of output, and may "
            f"have {request.max_total_tokens} here: nothing is left to generate"
        )
    _check_reports("logprobs", progress.logprobs, tokens if sampling.logprobs is not None else ())
    if progress.prompt_logprobs:
        is_scored = sampling.prompt_logprobs is not None and tokens
        _check_reports("prompt_logprobs", progress.prompt_logprobs, request.tokens[1:] if is_scored else ())


def _check_reports(name: str, reports: Sequence[TokenLogprobs], tokens: Sequence[int]) -> None:
    """Raises ValueError unless there is a report for each of these tokens, and no other."""
    if [report.token if isinstance(report, TokenLogprobs) else None for report in reports] != list(tokens):
        raise ValueError(
            f"resume: {name}: expected one for each of {len(tokens)} tokens, in their order, got {len(reports)}: where "
            "they are asked for those so far go along, and otherwise none"
        )
