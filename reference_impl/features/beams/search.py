"""Beam search: of all continuations of `width` texts, keep the `width` most probable ones, step by step.

A beam is a held request: the engine reports its best tokens and waits. Where two of the best continuations come from
one beam, it is forked, and the branches share every block but the one they write: beam search is where copy-on-write
pays most (Kwon et al. 2023, section 4.4). A beam without a continuation is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference_impl.core.engine import StepResult
from reference_impl.interfaces import Request, SamplingParams

if TYPE_CHECKING:  # any engine with `fork` and `append` (`engine.py` beside this file), and with pins
    from reference_impl.assembly.engine import Engine


@dataclass(frozen=True)
class Beam:
    """A text found. tokens: generated, with the end token if it has one. score: log-probability / length **
    length_penalty."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: str  # stop | length


@dataclass(frozen=True)
class _Candidate:
    logprob: float
    parent: Request
    token: int


def beam_search(
    engine: Engine,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    step: Callable[[], StepResult] | None = None,
) -> list[Beam]:
    """The `width` best texts found, best first. step: called for each step; needed if others use the engine too.
    ValueError if all beams may not fit at once; RuntimeError if one fails."""
    _check_room(engine, len(prompt) + max_tokens, width)
    step = step or engine.step
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2 * width, ignore_eos=True)
    root = engine.add(prompt, params, holds=True)
    ends = frozenset(engine.model.config.eos_token_ids)
    num_prompt, beams, done = root.num_tokens, [_Candidate(0.0, root, -1)], []

    def score(logprob: float, length: int) -> float:
        return logprob / length**length_penalty

    try:
        for length in range(1, root.max_total_tokens - num_prompt + 1):
            _wait_for([beam.parent for beam in beams], step)
            best = _best_candidates(beams, 2 * width)
            for candidate in best[:width]:
                if candidate.token in ends:
                    tokens = (*candidate.parent.tokens[num_prompt:], candidate.token)
                    done.append(Beam(tokens, candidate.logprob, score(candidate.logprob, length), "stop"))
            going_on = [candidate for candidate in best if candidate.token not in ends][:width]
            beams = _branch(engine, beams, going_on)
            done = sorted(done, key=lambda beam: -beam.score)[:width]
            if not beams or (len(done) == width and done[-1].score >= score(beams[0].logprob, length)):
                break
        else:
            for beam in beams:
                tokens = tuple(beam.parent.tokens[num_prompt:])
                done.append(Beam(tokens, beam.logprob, score(beam.logprob, len(tokens)), "length"))
    finally:
        for beam in beams:
            if beam.parent.id in engine.requests:
                engine.abort(beam.parent.id)
    return sorted(done, key=lambda beam: -beam.score)[:width]


def _check_room(engine: Engine, longest: int, width: int) -> None:
    """Raises ValueError unless all beams fit at once, even if they share nothing: held beams wait for each other."""
    seats, blocks = engine.config.max_num_seqs, width * -(-longest // engine.config.block_size) * len(engine.kv_specs)
    if not 1 <= width <= seats:
        raise ValueError(f"width: expected between 1 and max_num_seqs = {seats}, got {width}")
    room = engine.num_unpinned
    if blocks > room:
        raise ValueError(
            f"{width} beams of up to {longest} tokens may need {blocks} KV blocks; there are {room}: ask for fewer "
            "beams or tokens, take off a pin, or give the engine more memory (kv_cache_bytes)"
        )


def _wait_for(requests: Sequence[Request], step: Callable[[], StepResult]) -> None:
    """Runs steps until each request has been sampled from: under a small budget, or after a preemption, that takes
    several. RuntimeError if one has failed."""
    missing = {request.id for request in requests}
    while missing:
        missing -= step().tokens.keys()
    for request in requests:
        if request.error is not None:
            raise RuntimeError(request.error)


def _best_candidates(beams: Sequence[_Candidate], n: int) -> list[_Candidate]:
    """The n most probable continuations; twice as many as beams, so that enough are left if some of them end."""
    candidates = [
        _Candidate(beam.logprob + logprob, beam.parent, token)
        for beam in beams
        for token, logprob in beam.parent.logprobs[-1].top
    ]
    return sorted(candidates, key=lambda candidate: -candidate.logprob)[:n]


def _branch(engine: Engine, beams: Sequence[_Candidate], going_on: Sequence[_Candidate]) -> list[_Candidate]:
    """Makes each chosen continuation a beam, and aborts beams without one. The last of a parent's is the parent itself,
    the others are forks."""
    last = {candidate.parent.id: candidate for candidate in going_on}
    branches = []
    for candidate in going_on:
        if candidate is last[candidate.parent.id]:
            engine.append(candidate.parent.id, candidate.token)
            request = candidate.parent
        else:
            request = engine.fork(candidate.parent.id, candidate.token)
        branches.append(_Candidate(candidate.logprob, request, candidate.token))
    for beam in beams:
        if beam.parent.id not in last:
            engine.abort(beam.parent.id)
    return branches
