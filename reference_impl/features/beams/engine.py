"""Requests that branch: samples of one prompt (SamplingParams.n), and held requests, which go on with tokens that
another chooses, alone (`append`) or in several branches (`fork`). Branches share the blocks of what they have in common
(Kwon et al. 2023, section 4.4).

It extends `Engine.enqueue` and `Engine.abort` to a request's samples, and adds `fork` and `append`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from reference_impl.core.engine import Engine
from reference_impl.interfaces import ForksRequests, Request, RequestState


class BranchingEngine(Engine):
    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **options)
        self._num_forked = 0

    def enqueue(self, request: Request) -> Request:
        """With its other samples, `children`, which are forked when its prompt is computed."""
        children = [self._child(request, i, f"{request.id}/{i}") for i in range(1, request.sampling.n)]
        request.children = [*children]  # a scheduler may take them as requests of their own
        super().enqueue(request)
        for child in children:
            self._arrived(child)
        return request

    def abort(self, request_id: str, reason: str = "abort", num_dropped: int = 0) -> None:
        """Also samples that were not forked from it yet."""
        children = [*self._unfinished(request_id).children]
        super().abort(request_id, reason, num_dropped)
        for child in children:
            child.finish_reason = reason
            self._finished(child)

    def fork(self, request_id: str, token: int) -> Request:
        """A request of its own that begins like a held one and goes on with `token`; it shares the blocks so far.

        The branch is held too. Use it before `append`, and `append` for the branch that stays. Errors as of `append`.
        """
        if not isinstance(self.scheduler, ForksRequests):
            raise ValueError(f"fork: {type(self.scheduler).__name__} has no fork(parent, child), see ForksRequests")
        parent, token = self._held(request_id, token)
        self._num_forked += 1
        child = self._child(parent, parent.sample_index, f"{request_id}+{self._num_forked}")
        child.tokens.append(token)
        child.num_computed_tokens = parent.num_computed_tokens
        self._arrived(child)
        self.scheduler.fork(parent, child)
        return child

    def append(self, request_id: str, token: int) -> None:
        """A held request goes on with `token`: its own sampled tokens are reported and not appended.

        ValueError if it is not held, if the token is not in the vocabulary, or if it has all the tokens it may have.
        """
        request, token = self._held(request_id, token)
        if request.num_tokens >= request.max_total_tokens:
            raise ValueError(f"request {request_id!r} has {request.num_tokens} tokens, all it may have")
        request.tokens.append(token)

    def _held(self, request_id: str, token: int) -> tuple[Request, int]:
        request, vocab = self._unfinished(request_id), self.model.config.vocab_size
        if not request.holds:
            raise ValueError(
                f"request {request_id!r} goes on with what is sampled for it: expected one added with holds=True"
            )
        if not hasattr(token, "__index__") or not 0 <= token < vocab:
            raise ValueError(f"expected a token of the vocabulary [0, {vocab}), got {token!r}")
        return request, operator.index(token)

    def _child(self, parent: Request, sample_index: int, request_id: str) -> Request:
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        fresh: dict[str, Any] = {
            "num_computed_tokens": 0, "num_in_flight": 0, "num_cached_tokens": 0, "state": RequestState.WAITING,
        }  # fmt: skip
        return dataclasses.replace(
            parent, id=request_id, parent_id=parent.id, sample_index=sample_index, tokens=list(parent.tokens),
            block_tables=[[] for _ in parent.block_tables], children=[], logprobs=[], prompt_logprobs=[],
            sampling=dataclasses.replace(parent.sampling, n=1, prompt_logprobs=None), **fresh,
        )  # fmt: skip
