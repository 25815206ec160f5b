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
        """ValueError also for tokens outside the vocabulary in logit_bias, in allowed_token_ids, or in stop_token_ids
        with min_tokens, where min_tokens rules out all that are allowed, and for bad_words without their grammar."""
        if sampling.bad_words and others.get("grammar") is None:
            raise ValueError("bad_words: an engine has no tokenizer, which makes tokens of words: use LLM.generate")
        config, allowed = self.model.config, sampling.allowed_token_ids
        stops = sampling.stop_token_ids if sampling.min_tokens else ()
        for name, given in (
            ("logit_bias", sampling.logit_bias), ("allowed_token_ids", allowed), ("stop_token_ids", stops),
        ):  # fmt: skip
            for token in given or ():
                if not 0 <= token < config.vocab_size:
                    raise ValueError(f"{name}: {token} is outside the vocabulary [0, {config.vocab_size})")
        if allowed is not None and sampling.min_tokens:
            ends = {*stops, *(() if sampling.ignore_eos else config.eos_token_ids)}
            if ends.issuperset(allowed):
                raise ValueError("min_tokens rules out the end tokens, and allowed_token_ids has no other")
        return super().new_request(prompt, sampling, request_id, **others)
