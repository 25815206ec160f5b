"""Refuses requests whose sampling parameters name tokens that the model does not have."""

from __future__ import annotations

from reference_impl.core.model_config import ModelConfig
from reference_impl.interfaces import Request


def check_tokens(request: Request, config: ModelConfig) -> None:
    """Raises ValueError for tokens outside the vocabulary in logit_bias, in allowed_token_ids, or in stop_token_ids
    with min_tokens, if min_tokens rules out all that are allowed, and for bad_words without their grammar."""
    sampling = request.sampling
    if sampling.bad_words and request.grammar is None:
        raise ValueError("bad_words: an engine has no tokenizer, which makes tokens of words: use LLM.generate")
    allowed, stops = sampling.allowed_token_ids, sampling.stop_token_ids if sampling.min_tokens else ()
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
