"""An executor without a model and a clock without seconds: each step takes what the cost model says.

The scheduler, the blocks and the trace are the engine's own, so the order of events is real. The times are the cost
model's: the floors of `theory.deployment` for a stated MFU and MBU, or what was measured (`simulation.cost`), plus the
moves between device and host; launches and the host's work are left out of the floors unless you add them. The tokens
mean nothing: every request writes the same one until the given length is reached. Only the samples of one prompt differ
where they are drawn, since a prefix cache must not take one for the other. Drafts are right as often as is stated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from reference_impl.interfaces import Opened, Reply, Step, StepRow
from reference_impl.models.config_json import parse_model_config
from reference_impl.theory.deployment import Deployment

WORD, END = 7, 2  # what a simulated request writes (its sample i: WORD + i), and what ends it

_ENDS = (END,)


class StepCost(Protocol):
    """How long a step takes. `theory.deployment.Deployment` is one."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values per token, all layers."""
        ...

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        """Seconds of one forward pass; per row, tokens computed and tokens already in the cache."""
        ...


class SimulatedGPU:
    """Executor and clock in one, for `Parts(executor=gpu, clock=gpu, kv_cache=object(), attention=object())`.

    num_output_tokens: per request how many tokens it writes before it stops (with END in its stop_token_ids); one that
    is not in it writes until max_tokens. host_seconds: added to every step. host_link: byte/s between device and host.
    acceptance: where rows have drafts (EngineConfig.num_drafts), each draft token is right with this probability if all
    before it are, drawn from `seed`. draft_seconds: a step with drafts takes k times this longer, k the most that a row
    has; the verification is in the step's cost. keep_up_seconds: what a draft model takes in each step that it
    keeps up with, drafts or none. num_stages: pipeline stages. A step takes as long as with one, an equal
    part of it in each, and as many steps are in flight. ValueError unless 0 <= acceptance <= 1.
    """

    max_in_flight = 1

    def __init__(
        self,
        cost: StepCost,
        num_output_tokens: Mapping[str, int] | None = None,
        host_seconds: float = 0.0,
        host_link: float = 55e9,
        block_size: int = 16,
        *,
        acceptance: float = 0.0,
        draft_seconds: float = 0.0,
        keep_up_seconds: float = 0.0,
        seed: int = 0,
        num_stages: int = 1,
    ):
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance: expected a probability, 0 to 1, got {acceptance}")
        self.acceptance, self._random = acceptance, random.Random(seed)
        self.draft_seconds, self.keep_up_seconds = draft_seconds, keep_up_seconds
        self.cost, self.host_seconds, self.host_link = cost, host_seconds, host_link
        self.num_output_tokens = {} if num_output_tokens is None else num_output_tokens
        self.bytes_per_block = block_size * cost.bytes_per_token
        self.num_stages = num_stages
        self._stage_ends = [0.0] * num_stages  # when each has computed its part of the step submitted last
        self.time = 0.0
        self._words: dict[int, tuple[int]] = {}  # by slot, what it writes
        self._lengths: dict[int, int] = {}  # by slot, with how many tokens it ends, where that is given

    def now(self) -> float:
        return self.time

    def submit(self, step: Step) -> Reply:
        started, transfers = self.time, step.transfers
        for new in step.opened:
            self._open(new)
        moved = len(transfers.swap_out) + len(transfers.swap_in)
        self.time += self.host_seconds + moved * self.bytes_per_block / self.host_link
        finished, drafting = self.time, 0.0
        if step.rows:
            lengths = [row.length for row in step.rows]
            seconds = self.cost.step_seconds(lengths, [row.start for row in step.rows])
            drafting = self.draft_seconds * max(row.num_drafts for row in step.rows)
            drafting += self.keep_up_seconds * step.keeps_up
            finished = self._through_stages(seconds + drafting)
        tokens = tuple(
            () if not row.samples
            else self._with_drafts(row) if row.num_drafts
            else _ENDS if row.start + row.num_tokens + 1 == self._lengths.get(row.slot)
            else self._words[row.slot]
            for row in step.rows
        )  # fmt: skip
        return Reply(step.step_id, tokens, {}, started, finished, drafting=drafting)

    def _through_stages(self, seconds: float) -> float:
        """When a step of this length ends. A stage begins when the one before it and its own last step are done."""
        end = self.time
        for stage, free in enumerate(self._stage_ends):
            end = self._stage_ends[stage] = max(end, free) + seconds / self.num_stages
        return end

    def _with_drafts(self, row: StepRow) -> tuple[int, ...]:
        """The row's tokens: as many drafts as are right, and one token more; nothing after the end."""
        num = 1
        while num <= row.num_drafts and self._random.random() < self.acceptance:
            num += 1
        before, length = row.start + row.num_tokens, self._lengths.get(row.slot)
        if length is not None and before + num >= length:
            return self._words[row.slot] * (length - before - 1) + _ENDS
        return self._words[row.slot] * num

    def _open(self, new: Opened) -> None:
        # Greedy samples are alike.
        self._words[new.slot] = (WORD + new.sample_index if new.sampling.temperature > 0 else WORD,)
        self._lengths.pop(new.slot, None)
        if new.request_id in self.num_output_tokens:
            self._lengths[new.slot] = new.num_prompt_tokens + self.num_output_tokens[new.request_id]

    def collect(self, ticket: Reply) -> Reply:
        self.time = max(self.time, ticket.finished_at)
        return ticket

    def close(self) -> None:
        pass


def weightless(deployment: Deployment, longest: int = 131_072) -> Any:
    """What the engine asks a model for, without weights: vocabulary and positions. longest: positions of a sequence.

    It is one layer thin, so that the engine does not look for the memory of the GPU on this machine.
    """
    return hollow_model(deployment.shape.vocab_size, longest, deployment.bytes_per_token)


def hollow_model(vocab_size: int, longest: int, bytes_per_token: float) -> Any:
    """Like `weightless`, without a particular model. It does not need torch, which takes more memory than a simulation.

    bytes_per_token: of keys and values. One head has them all, so that a budget in bytes (kv_cache_bytes, swap_bytes)
    pays for as many blocks as it does for the model that is left out.
    """
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 1, "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "head_dim": max(2, 2 * round(bytes_per_token / 8)),
            "rms_norm_eps": 1e-5, "max_position_embeddings": longest, "torch_dtype": "bfloat16", "eos_token_id": 0,
        }
    )  # fmt: skip
    config = replace(config, vocab_size=vocab_size)  # more than a real model may have: tokens are drawn, not looked up
    rotary = SimpleNamespace(max_position=longest)
    return SimpleNamespace(
        config=config, dtype=SimpleNamespace(itemsize=2), device=SimpleNamespace(type="cpu"), rotary=rotary
    )
