"""What a worker keeps of the requests that have a slot: tokens, lengths, block tables, how they are sampled.

On the device lie the tokens, [slot, position], how many of them are computed, and per KV group the block tables. A step
changes a few entries and names the slots of its rows; what its batch needs is looked up on the device. So a token that
one step samples is there for the next without the host, and what is copied per step does not grow with the contexts.

Behind the last slot lies one more, for rows that only pad a batch: it has no block, so no keys are written for it, and
what is sampled for it is dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.interfaces import NO_BLOCK, KVSpec, Opened, Pooling, SamplingParams, Step
from reference_impl.sampling.penalties import TokenCounts, has_penalties
from reference_impl.sampling.sampler import COLUMNS, Parameters, columns
from reference_impl.staging import Arrays, to_device


@dataclass(eq=False)
class Slot:
    """What the worker's host holds for a request; a sampler may read it (`Asking`).

    tokens: those that the host has. A worker whose sampler waits for each token keeps them up to date.
    """

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    sample_index: int
    holds: bool
    pooling: Pooling | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass
class _Writes:
    """Entries of a table on the device, to be set in one launch."""

    slot: list[NDArray[np.int64]] = field(default_factory=list)
    column: list[NDArray[np.int64]] = field(default_factory=list)
    value: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, slot: int, start: int, values: Sequence[int] | NDArray[np.int64]) -> None:
        new = np.asarray(values, np.int64)
        self.slot.append(np.full(len(new), slot))
        self.column.append(np.arange(start, start + len(new)))
        self.value.append(new)

    def arrays(self, name: str) -> Arrays:
        parts = {"slot": self.slot, "column": self.column, "value": self.value}
        return {f"{name}.{part}": np.concatenate(found) for part, found in parts.items()} if self.slot else {}


class Slots:
    """num_slots: requests that may have one at a time. max_len: positions of a request."""

    def __init__(self, num_slots: int, max_len: int, specs: Sequence[KVSpec], device: torch.device):
        self.num_slots, self.specs, self.device = num_slots, specs, device
        self.host: dict[int, Slot] = {}
        self.scored: set[int] = set()  # slots whose prompts have log-probabilities
        self.pooled: set[int] = set()  # slots whose hidden states are asked for
        rows = num_slots + 1
        # empty: of the padding slot only the first token is read, of others only what was written
        self.tokens = torch.empty(rows, max_len + 1, dtype=torch.int32, device=device)
        self.tokens[num_slots, 0] = 0
        self.computed = torch.zeros(rows, dtype=torch.int64, device=device)
        blocks = [-(-max_len // spec.block_size) for spec in specs]
        self.tables = [torch.full((rows, n), NO_BLOCK, dtype=torch.int32, device=device) for n in blocks]
        self.counts = TokenCounts(device)
        self.sampling = {name: np.zeros(rows, dtype) for name, dtype in COLUMNS.items()}  # on the host

    # --- what a step changes --------------------------------------------------------------------------------------

    def _with_all_tokens(self, new: Opened) -> Opened:
        if new.fork_of is None:
            return new
        slot, num_tokens = new.fork_of
        parent = self.host.get(slot)
        if parent is None or len(parent.tokens) < num_tokens:
            has = "which is not open" if parent is None else f"of which the host has {len(parent.tokens)}"
            raise ValueError(
                f"request {new.request_id!r} is to begin with {num_tokens} tokens of slot {slot}, {has}: expected one "
                "that was open before this step"
            )
        return new._replace(tokens=array("q", parent.tokens[:num_tokens]) + new.tokens, fork_of=None)

    def apply(self, step: Step) -> Sequence[Opened]:
        """Opens, closes and updates slots; returns those that are opened, with all their tokens. ValueError if a slot's
        number is too high, or one is to begin like a slot that is not open."""
        opened = [self._with_all_tokens(new) for new in step.opened]
        for slot in step.closed:
            self.host.pop(slot, None)
            self.scored.discard(slot)
            self.pooled.discard(slot)
            self.counts.close(slot)
        if not (opened or step.appended or step.rewound or step.tables):
            return opened
        tokens, arrays = _Writes(), Arrays()
        for new in opened:
            self._open(new)
            tokens.add(new.slot, 0, np.frombuffer(new.tokens, np.int64))
        for more in step.appended:
            tokens.add(more.slot, more.start, more.tokens)
            self.host[more.slot].tokens += more.tokens
        if opened:
            arrays["opened"] = np.array([new.slot for new in opened])
        if moved := [*((new.slot, new.num_computed_tokens) for new in opened), *step.rewound]:
            arrays["moved"], arrays["computed"] = np.array(moved).T.copy()
        arrays |= tokens.arrays("tokens")
        for group in range(len(self.specs)):
            writes = _Writes()
            for update in step.tables:
                if update.group == group:
                    writes.add(update.slot, update.start, update.blocks)
            arrays |= writes.arrays(f"table.{group}")
        self._write(to_device(arrays, self.device))
        for new in opened:
            if has_penalties(new.sampling):
                self.counts.open(new.slot, new.tokens, new.num_prompt_tokens)
        for more in step.appended:
            self.counts.append(more.slot, more.tokens)
        return opened

    def _open(self, new: Opened) -> None:
        """On the host."""
        if new.slot >= self.num_slots:
            raise ValueError(
                f"request {new.request_id!r} is to have slot {new.slot}; this worker has {self.num_slots}: "
                "the scheduler lets more requests run than max_num_seqs, or takes blocks away without naming whose "
                "in StepPlan.preempted"
            )
        self.host[new.slot] = Slot(
            new.request_id, list(new.tokens), new.num_prompt_tokens, new.sampling, new.seed, new.sample_index,
            new.holds, new.pooling,
        )  # fmt: skip
        if new.pooling is not None:
            self.pooled.add(new.slot)
        if new.sampling.prompt_logprobs is not None:
            self.scored.add(new.slot)
        for name, (value,) in columns([new.sampling], [new.seed], [new.sample_index]).items():
            self.sampling[name][new.slot] = value

    def _write(self, t: Mapping[str, Tensor]) -> None:
        if "moved" in t:
            self.computed[t["moved"]] = t["computed"]
        if "opened" in t:
            for table in self.tables:
                table.index_fill_(0, t["opened"], NO_BLOCK)
        tables = {"tokens": self.tokens, **{f"table.{g}": table for g, table in enumerate(self.tables)}}
        for name, table in tables.items():
            if f"{name}.slot" in t:
                table[t[f"{name}.slot"], t[f"{name}.column"]] = t[f"{name}.value"].int()

    # --- what a step reads ----------------------------------------------------------------------------------------

    def look_up(self, t: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
        """The fields of a `Batch` that the slots of its rows decide. Only launches; pads are inert.

        t: slots, query_lens [rows]; of each token its slot and its place among the row's: token_slots, offset.
        longest: positions of the longest context, at least.
        """
        slot = t["token_slots"]
        at = self.computed.index_select(0, slot) + t["offset"]  # half the time of computed[slot], with one row
        found = {
            "input_ids": self.tokens[slot, at].long(),
            "positions": at,
            "seq_lens": (self.computed.index_select(0, t["slots"]) + t["query_lens"]).int(),
        }
        for g, (spec, table) in enumerate(zip(self.specs, self.tables, strict=True)):
            size = spec.block_size
            found[f"slot_mapping.{g}"] = table[slot, at // size].long() * size + at % size  # < 0: there is no block
            found[f"block_table.{g}"] = table[t["slots"], : -(-longest // size)].clamp(min=0)
        return found

    def behind(self, t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Where a token is sampled: of each of the step's logits its slot, and how many tokens its request has there.
        Before `advance`.

        t: sampling_slots, sampling_lens [logits], or slots and query_lens where each row has one.
        """
        names = ("sampling_slots", "sampling_lens") if "sampling_slots" in t else ("slots", "query_lens")
        slots, lens = (t[name] for name in names)
        return slots, self.computed.index_select(0, slots) + lens

    def put(self, t: Mapping[str, Tensor], tokens: Tensor) -> None:
        """What was chosen, `behind` what the rows compute. Idempotent. Where a request is held, it is
        overwritten with what is appended. tokens: of the first logits, or of all.
        """
        slots, at = (x[: len(tokens)] for x in self.behind(t))
        self.tokens.index_put_((slots, at), tokens.int())

    def advance(self, t: Mapping[str, Tensor], accepted: Tensor | None = None) -> None:
        """What a step's rows compute is computed when it is over: for whatever is launched from here on. Of drafts only
        the accepted ones, [rows with drafts]."""
        self.computed.index_add_(0, t["slots"], t["query_lens"])
        if accepted is not None:
            self.computed.index_add_(0, t["draft.slots"], accepted - t["draft.num"])

    # --- sampling -------------------------------------------------------------------------------------------------

    def parameters(self, slots: Sequence[int], lengths: Sequence[int]) -> Parameters:
        """lengths: tokens of each."""
        params = tuple(self.host[slot].sampling for slot in slots)
        arrays = {name: of_slot[slots] for name, of_slot in self.sampling.items()}
        arrays["position"] = np.array(lengths)
        return Parameters(params, arrays, self.counts.of(slots, params) if self.counts.places else None)
