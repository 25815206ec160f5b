"""Admission that promises completion: a request is admitted when all that it may ever have fits. So fewer requests run,
and none is preempted unless layers have sliding windows (TensorRT-LLM's GUARANTEED_NO_EVICT)."""

from __future__ import annotations

from reference_impl.interfaces import Request


def most_tokens(request: Request) -> int:
    """The most tokens of a request that need blocks: all but its last one, which is never read."""
    return max(request.num_tokens, request.max_total_tokens - 1)
