"""From the scheduler's plan, which names requests, to the step for a worker, which names slots.

A request gets a slot when it is first computed, and keeps it until it ends or loses its blocks. Nothing is sent
twice: its tokens go over when its slot is opened, its block table as it grows, and what the worker samples is in the
slot already. So for a row that decodes, the planner compares two lengths and two block tables, and sends six numbers.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from reference_impl.interfaces import (
    Appended,
    BlockId,
    Opened,
    Reply,
    Request,
    Rewound,
    Row,
    Step,
    StepOutput,
    StepPlan,
    StepRow,
    TableUpdate,
)

_step_row = partial(tuple.__new__, StepRow)  # as StepRow(*values), in half the time: one for each row of each step


@dataclass
class Sent:
    """What the worker holds for a request with a slot."""

    slot: int
    request: Request
    num_tokens: int  # sent by the host, or sampled by the worker
    num_computed: int
    tables: list[list[BlockId]]
    opened_in: int  # step id
    capacity: int = 0  # tokens that its blocks hold


class Planner:
    """Turns plans into steps. Slots are numbered from 0; a request gets the smallest free one. block_size: tokens in a
    block."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.sent: dict[str, Sent] = {}  # by request id
        self._closed: list[int] = []  # since the last step
        self._free: list[int] = []  # a heap of slots below num_slots
        self.num_slots = 0  # the most ever in use at once
        self.has_drafted = False  # whether a row of any step had drafts

    def step(self, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """The step for the worker. requests: by id, all that the plan has rows for.

        IndexError if a request has too few blocks for its row, ValueError if its row ends behind its last token.
        """
        for name in plan.preempted:
            self.close(name)
        opened: list[Opened] = []
        appended: list[Appended] = []
        rewound: list[Rewound] = []
        tables: list[TableUpdate] = []
        rows: list[StepRow] = []
        for row in plan.rows:
            name, start, num_tokens, samples, num_drafts, drafts = row
            request, sent = requests[name], self.sent.get(name)
            if sent is None or sent.request is not request or sent.num_computed < start:
                self.close(name)
                sent = self._open(request, start, plan.step_id, opened)
            elif sent.num_computed > start:  # static batching computes the last token of a finished request again
                rewound.append(Rewound(sent.slot, start))
            if sent.num_tokens < len(request.tokens):
                appended.append(Appended(sent.slot, sent.num_tokens, tuple(request.tokens[sent.num_tokens :])))
                sent.num_tokens = len(request.tokens)
            if sent.tables != request.block_tables:  # compares pointers, of the same objects: half a nanosecond each
                tables += self._changes(sent)
            last = end = start + num_tokens
            if num_drafts:
                self.has_drafted, last = True, end + num_drafts
            if end > sent.num_tokens or last > sent.capacity:
                self._refuse(sent, row)
            sent.num_computed = last
            if samples and not request.holds:
                sent.num_tokens = last + 1
            rows.append(_step_row((sent.slot, start, num_tokens, samples, num_drafts, drafts)))
        closed, self._closed = self._closed, []
        return Step(
            plan.step_id, tuple(closed), tuple(opened), tuple(appended), tuple(rewound), tuple(tables), plan.transfers,
            tuple(rows), keeps_up=plan.keeps_up,
        )  # fmt: skip

    def _open(self, request: Request, start: int, step_id: int, opened: list[Opened]) -> Sent:
        slot = heapq.heappop(self._free) if self._free else self.num_slots
        self.num_slots = max(self.num_slots, slot + 1)
        sent = Sent(slot, request, len(request.tokens), start, [[] for _ in request.block_tables], step_id)
        self.sent[request.id] = sent
        opened.append(self.opened(sent))
        return sent

    def opened(self, sent: Sent) -> Opened:
        """The message that gives a request its slot, with all its tokens."""
        r = sent.request
        return Opened(
            sent.slot, r.id, array("q", r.tokens), r.num_prompt_tokens, sent.num_computed, r.sampling, r.seed,
            r.sample_index, r.holds, r.pooling,
        )  # fmt: skip

    def _changes(self, sent: Sent) -> Iterator[TableUpdate]:
        """What changed in the request's block tables. They only grow, with exceptions: a shared block is copied before
        it is written, a cached block replaces one of the same contents, and blocks behind a window are freed."""
        for group, table in enumerate(sent.request.block_tables):
            known = sent.tables[group]
            start = len(known)
            if table[:start] != known:
                pairs = enumerate(zip(known, table, strict=False))
                start = next((i for i, (old, new) in pairs if old != new), len(table))
            if table != known:
                sent.tables[group] = list(table)
                yield TableUpdate(sent.slot, group, start, tuple(table[start:]))
        sent.capacity = min(map(len, sent.tables)) * self.block_size

    def _refuse(self, sent: Sent, row: Row) -> None:
        end = row.start + row.num_tokens
        if (last := end + row.num_drafts) > sent.capacity:
            raise IndexError(
                f"request {row.request_id!r} holds {sent.capacity // self.block_size} blocks; its step ends at "
                f"position {last}, which takes {-(-last // self.block_size)} of {self.block_size} tokens: "
                "KVManager.reserve and admit must give them before"
            )
        raise ValueError(
            f"request {row.request_id!r} has {sent.num_tokens} tokens, of which the plan computes [{row.start}, {end}):"
            " expected no more than it has, or will have when the step before is over"
        )

    def close(self, request_id: str) -> None:
        """Frees the slot, if it has one, of a request that ended or lost its blocks; the next step says so."""
        sent = self.sent.pop(request_id, None)
        if sent is not None:
            self._closed.append(sent.slot)
            heapq.heappush(self._free, sent.slot)

    def close_all(self) -> None:
        """Closes every slot after a failed step, which may have taken effect in part: the next opens them again."""
        for name in list(self.sent):
            self.close(name)


def output_of(reply: Reply, rows: Sequence[Row]) -> StepOutput:
    """A worker's reply in the scheduler's terms, by request. rows: the plan's."""
    tokens = {row.request_id: new for row, new in zip(rows, reply.tokens, strict=True) if new}
    logprobs = {rows[at].request_id: reports for at, reports in reply.logprobs.items()}
    return StepOutput(
        tokens, logprobs, reply.started_at, reply.finished_at, reply.attention, reply.transfers, reply.layers_moved,
        reply.drafting, reply.ranks,
    )  # fmt: skip
