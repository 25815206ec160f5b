"""Admission that promises completion: a request is admitted when all that it may ever have fits, so that none is
preempted, unless windows come and go, and fewer run (TensorRT-LLM's GUARANTEED_NO_EVICT)."""

from __future__ import annotations

from reference_impl.interfaces import Request


def most_tokens(request: Request) -> int:
    """All but its last token, which is never read."""
    return max(request.num_tokens, request.max_total_tokens - 1)
