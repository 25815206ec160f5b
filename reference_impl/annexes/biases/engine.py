"""Requests whose sampling names tokens that the model does not have are refused. It extends `Engine.new_request`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.engine import Engine
from reference_impl.interfaces import Request, SamplingParams


class BiasingEngine(Engine):
    def new_request(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None, **others: Any
    ) -> Request:
        """ValueError also for tokens of logit_bias, or of stop_token_ids with min_tokens, outside the vocabulary."""
        vocab_size = self.model.config.vocab_size
        for name, used in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.min_tokens)):
            for token in getattr(sampling, name) if used else ():
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name}: {token} is outside the vocabulary [0, {vocab_size})")
        return super().new_request(prompt, sampling, request_id, **others)
