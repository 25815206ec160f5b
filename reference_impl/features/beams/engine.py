"""Requests that branch: samples of one prompt (SamplingParams.n), and held requests, which go on with tokens that
another chooses, alone (`append`) or in several branches (`fork`). Branches share the blocks of what they have in common
(Kwon et al. 2023, section 4.4)."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from reference_impl.core.engine import Engine
from reference_impl.interfaces import ForksRequests, Request, RequestState


class Branches:
    """The branches of an engine's requests."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._num_forked = 0

    def add_samples(self, request: Request) -> None:
        """Makes the request's other samples its `children`, which are forked when its prompt is computed."""
        request.children = [self._child(request, i, f"{request.id}/{i}") for i in range(1, request.sampling.n)]

    def fork(self, request_id: str, token: int) -> Request:
        """Adds a request that begins like a held one and goes on with `token`; it shares the blocks so far.

        The branch is held too. Fork before `append`, and use `append` for the branch that stays. Errors: see `append`,
        and ValueError for a scheduler that does not fork.
        """
        engine = self.engine
        if not isinstance(engine.scheduler, ForksRequests):
            raise ValueError(f"fork: {type(engine.scheduler).__name__} has no fork(parent, child), see ForksRequests")
        parent, token = self._held(request_id, token)
        self._num_forked += 1
        child = self._child(parent, parent.sample_index, f"{request_id}+{self._num_forked}")
        child.tokens.append(token)
        child.num_computed_tokens = parent.num_computed_tokens
        engine.arrived(child)
        engine.scheduler.fork(parent, child)
        return child

    def append(self, request_id: str, token: int) -> None:
        """Appends `token` to a held request, whose own sampled tokens are reported and not appended.

        ValueError if it is not held, if the token is not in the vocabulary, or if it has all the tokens it may have.
        """
        request, token = self._held(request_id, token)
        if request.num_tokens >= request.max_total_tokens:
            raise ValueError(f"request {request_id!r} has {request.num_tokens} tokens, all it may have")
        request.tokens.append(token)

    def _held(self, request_id: str, token: int) -> tuple[Request, int]:
        self.engine.check_not_lost()
        request, vocab = self.engine.unfinished(request_id), self.engine.model.config.vocab_size
        if not request.holds:
            raise ValueError(
                f"request {request_id!r} goes on with what is sampled for it: expected one added with holds=True"
            )
        if not hasattr(token, "__index__") or not 0 <= token < vocab:
            raise ValueError(f"expected a token of the vocabulary [0, {vocab}), got {token!r}")
        return request, operator.index(token)

    def _child(self, parent: Request, sample_index: int, request_id: str) -> Request:
        self.engine.check_name(request_id)
        fresh: dict[str, Any] = {
            "num_computed_tokens": 0, "num_in_flight": 0, "num_cached_tokens": 0, "state": RequestState.WAITING,
        }  # fmt: skip
        return dataclasses.replace(
            parent, id=request_id, parent_id=parent.id, sample_index=sample_index, tokens=list(parent.tokens),
            block_tables=[[] for _ in parent.block_tables], children=[], logprobs=[], prompt_logprobs=[],
            sampling=dataclasses.replace(parent.sampling, n=1, prompt_logprobs=None), **fresh,
        )  # fmt: skip
