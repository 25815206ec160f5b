"""Runs steps on one device, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from reference_impl.executor.batch import build_batch
from reference_impl.interfaces import (
    AttentionBackend,
    Clock,
    KVCache,
    KVSpec,
    Request,
    Sampler,
    StepOutput,
    StepPlan,
)
from reference_impl.models.decoder import Decoder
from reference_impl.sampling.sampler import sample


class LocalExecutor:
    """submit() computes at once; collect() hands over what it found."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        kv_specs: Sequence[KVSpec],
        clock: Clock,
        sampler: Sampler = sample,
    ):
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.kv_specs, self.clock, self.sampler = kv_specs, clock, sampler

    @torch.inference_mode()
    def submit(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        started = self.clock.now()
        self.kv_cache.transfer(plan.transfers)
        if not plan.rows:
            return StepOutput({}, {}, started, self.clock.now())
        batch = build_batch(plan, requests, self.kv_specs, self.model.device)
        logits = self.model(batch, self.kv_cache, self.attention)
        by_id = {row.request_id: row for row in plan.rows}
        sampling = [requests[i] for i in batch.request_ids if by_id[i].samples]
        tokens, logprobs = {}, {}
        if sampling:
            sampled = self.sampler(logits, sampling)
            for request, token, report in zip(sampling, sampled.tokens, sampled.logprobs, strict=True):
                tokens[request.id] = token
                if report is not None:
                    logprobs[request.id] = report
        ran = tuple(sorted(getattr(self.attention, "ran", ())))  # a learner's backend need not say
        return StepOutput(tokens, logprobs, started, self.clock.now(), ran)

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket

    def close(self) -> None:
        pass
