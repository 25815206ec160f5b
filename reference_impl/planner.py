"""From the scheduler's plan, which names requests, to the step for a worker, which names slots.

A request gets a slot when it is first computed, and keeps it until it ends or loses its blocks. Nothing is sent
twice: its tokens go over when its slot is opened, less those that it shares with a request
that it was forked from; its block table as it grows. So a step that only decodes costs the planner one
comparison per row.
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
class _Sent:
    """What the worker holds for a request with a slot."""

    slot: int
    request: Request
    num_tokens: int  # those that were sent, and those that it samples itself
    num_computed: int
    tables: list[list[BlockId]]
    opened_in: int  # the step
    room: int = 0  # positions that its blocks have


class Planner:
    """block_size: tokens in a block. Slots are numbered from 0, and the smallest that is free is given out."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._sent: dict[str, _Sent] = {}  # by request id
        self._closed: list[int] = []  # since the last step
        self._free: list[int] = []  # a heap of slots below num_slots
        self.num_slots = 0  # the most ever in use at once
        self.has_drafted = False  # whether a row of any step had drafts

    def step(self, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """requests: by id, all that the plan has rows of.

        IndexError if a request has too few blocks for its row, ValueError if it has no token there.
        """
        for name in plan.preempted:
            self.close(name)
        opened: list[Opened] = []
        appended: list[Appended] = []
        rewound: list[Rewound] = []
        tables: list[TableUpdate] = []
        rows: list[StepRow] = []
        takes_masks = False
        for row in plan.rows:
            name, start, num_tokens, samples, num_drafts, drafts = row
            request, sent = requests[name], self._sent.get(name)
            if sent is None or sent.request is not request or sent.num_computed < start:
                self.close(name)
                sent = self._open(request, start, plan.step_id, opened)
            elif sent.num_computed > start:  # static batching computes the last token of a finished request again
                rewound.append(Rewound(sent.slot, start))
            if sent.num_tokens < len(request.tokens):
                appended.append(Appended(sent.slot, sent.num_tokens, tuple(request.tokens[sent.num_tokens :])))
                sent.num_tokens = len(request.tokens)
            end = start + num_tokens
            # The blocks that were sent are the same objects, so this compares pointers: half a nanosecond each.
            if sent.tables != request.block_tables:
                tables += self._changes(sent)
            last = end
            if num_drafts:
                self.has_drafted, last = True, end + num_drafts
            if end > sent.num_tokens or last > sent.room:
                self._refuse(sent, row)
            sent.num_computed = last
            if samples:
                if request.pooling is not None:
                    raise ValueError(
                        f"request {name!r} asks for hidden states (pooling), and its row samples: the scheduler has to "
                        "plan its rows with samples=False, and end it when its prompt is computed"
                    )
                takes_masks = takes_masks or request.grammar is not None
                if not request.holds:
                    sent.num_tokens = last + 1
            rows.append(_step_row((sent.slot, start, num_tokens, samples, num_drafts, drafts)))
        closed, self._closed = self._closed, []
        return Step(
            plan.step_id, tuple(closed), tuple(opened), tuple(appended), tuple(rewound), tuple(tables), plan.transfers,
            tuple(rows), takes_masks,
        )  # fmt: skip

    def _open(self, request: Request, start: int, step_id: int, opened: list[Opened]) -> _Sent:
        slot = heapq.heappop(self._free) if self._free else self.num_slots
        self.num_slots = max(self.num_slots, slot + 1)
        sent = _Sent(slot, request, len(request.tokens), start, [[] for _ in request.block_tables], step_id)
        self._sent[request.id] = sent
        fork_of = self._parent_of(request, step_id)
        tokens = request.tokens if fork_of is None else request.tokens[fork_of[1] :]
        opened.append(
            Opened(
                slot, request.id, array("q", tokens), request.num_prompt_tokens, start, request.sampling,
                request.seed, request.sample_index, request.holds, request.pooling, fork_of,
            )
        )  # fmt: skip
        return sent

    def _parent_of(self, request: Request, step_id: int) -> tuple[int, int] | None:
        """As `Opened.fork_of`: of tokens that the worker did not sample."""
        parent = None if request.parent_id is None else self._sent.get(request.parent_id)
        if parent is None or parent.opened_in == step_id:
            return None
        num_sent = len(parent.request.tokens) if parent.request.holds else parent.request.num_prompt_tokens
        num_shared = min(request.num_computed_tokens, num_sent, parent.num_tokens)
        if request.tokens[:num_shared] != parent.request.tokens[:num_shared]:  # a later request of this name
            return None
        return (parent.slot, num_shared) if num_shared else None

    def _changes(self, sent: _Sent) -> Iterator[TableUpdate]:
        """Tables grow, with exceptions: a shared block is copied before it is written, a cached block replaces one
        of the same contents, and blocks behind a window are freed."""
        for group, table in enumerate(sent.request.block_tables):
            known = sent.tables[group]
            start = len(known)
            if table[:start] != known:
                pairs = enumerate(zip(known, table, strict=False))
                start = next((i for i, (old, new) in pairs if old != new), len(table))
            if table != known:
                sent.tables[group] = list(table)
                yield TableUpdate(sent.slot, group, start, tuple(table[start:]))
        sent.room = min(map(len, sent.tables)) * self.block_size

    def _refuse(self, sent: _Sent, row: Row) -> None:
        end = row.start + row.num_tokens
        if (last := end + row.num_drafts) > sent.room:
            raise IndexError(
                f"request {row.request_id!r} holds {sent.room // self.block_size} blocks; its step ends at position "
                f"{last}, which takes {-(-last // self.block_size)} of {self.block_size} tokens: "
                "KVManager.reserve and admit must give them before"
            )
        raise ValueError(
            f"request {row.request_id!r} has {sent.num_tokens} tokens, of which the plan computes [{row.start}, {end}):"
            " expected no more than it has, or will have when the step before is over"
        )

    def settle(self, step: Step, reply: Reply, requests: Mapping[str, Request]) -> None:
        """A step is over: of the drafts that were counted as if they were right, some were not.

        requests: those of the step's rows, by id.
        """
        for row, request, new in zip(step.rows, requests.values(), reply.tokens, strict=True):
            sent = self._sent.get(request.id) if row.num_drafts else None
            if sent is not None and sent.request is request:
                wrong = row.num_drafts + 1 - len(new)
                sent.num_computed -= wrong
                sent.num_tokens -= wrong

    def close(self, request_id: str) -> None:
        """The request ended, or lost its blocks: the next step frees its slot, if it has one."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._closed.append(sent.slot)
            heapq.heappush(self._free, sent.slot)

    def close_all(self) -> None:
        """After a failed step, of which an unknown part was applied: the next step opens every slot again."""
        for name in list(self._sent):
            self.close(name)

    def skip(self, request: Request, num_tokens: int) -> None:
        """Tokens were computed, and as many sampled, without a step: the simulator leaps over steps."""
        sent = self._sent[request.id]
        sent.num_computed += num_tokens
        sent.num_tokens += num_tokens


def output_of(reply: Reply, rows: Sequence[Row]) -> StepOutput:
    """A reply in the scheduler's terms. rows: of the plan."""
    tokens = {row.request_id: new for row, new in zip(rows, reply.tokens, strict=True) if new}
    logprobs = {rows[at].request_id: reports for at, reports in reply.logprobs.items()}
    return StepOutput(
        tokens, logprobs, reply.started_at, reply.finished_at, reply.attention, reply.transfers, reply.layers_moved
    )
