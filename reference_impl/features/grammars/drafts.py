"""What grammars allow behind drafts. A draft token has a mask of its own, for the text with it and all before it. One
that is forbidden, or behind which there is no mask, is cut, with all behind it.

Drafts of the host are cut before the step is planned (`allowed_drafts`). Those of the worker, a chain or a tree, come
back before masks are sent (`ShowsDrafts`). A draft model may have its logits masked, too: then it asks for masks while
it drafts, and drafts nothing that is forbidden. That is worth a wait only if the host has nothing else to do, so it is
done with one step in flight (`DraftsLater`), and not if the next is submitted while one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from reference_impl.interfaces import Executor, Grammar, Request, RequestState, Row, Step, StepPlan

# (row of the step, drafts of the step before a position) for several positions -> the mask at each; None: anything is
# allowed, or the text is forbidden.
AskMasks: TypeAlias = Callable[[Sequence[tuple[int, tuple[int, ...]]]], Sequence[bytes | None]]


class Drafted(NamedTuple):
    """The drafts of a row. parents: for each draft token the number of the one before it; -1: the row's last known
    token."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass(frozen=True)
class DraftsLater(Step):
    """A step whose drafts may wait until `show_drafts` is called, where a draft model's masks can be asked for."""


@runtime_checkable
class ShowsDrafts(Protocol):
    """An executor whose drafts the host can see before it sends masks."""

    def show_drafts(self, ticket: Any, ask: AskMasks) -> Sequence[Drafted]:
        """The drafts of each row of a step that waits for masks. Waits for the draft model, not for the target. ask:
        for a step that is a `DraftsLater`; called before this returns."""
        ...


def are_bound(rows: Sequence[Row], requests: Mapping[str, Request]) -> bool:
    """Whether the worker makes drafts for requests under a grammar."""
    return any(
        row.num_drafts and not row.drafts and requests[row.request_id].grammar is not None for row in rows
    )  # fmt: skip


def worker_drafts(
    executor: Executor, ticket: Any, plan: StepPlan, requests: Mapping[str, Request], ask: AskMasks
) -> Sequence[Drafted] | None:
    """The worker's drafts of each row; None: no mask depends on them."""
    if not are_bound(plan.rows, requests):
        return None
    assert isinstance(executor, ShowsDrafts)  # or there would be none in such a row
    return executor.show_drafts(ticket, ask)


class StepMasks:
    """The masks of a step's rows. A grammar is asked about each text once, and about none that it forbids: drafts are
    cut there. Calling the object is an `AskMasks`."""

    def __init__(self, plan: StepPlan, requests: Mapping[str, Request]):
        self.rows, self.requests = plan.rows, requests
        self.known: dict[tuple[int, tuple[int, ...]], bytes | None] = {}  # by row and drafts

    def __call__(self, texts: Sequence[tuple[int, tuple[int, ...]]]) -> list[bytes | None]:
        return [self.behind(row, drafts) for row, drafts in texts]

    def behind(self, row: int, drafts: tuple[int, ...]) -> bytes | None:
        """The mask of a row behind these drafts; None: there is none."""
        if (row, drafts) not in self.known:
            self.known[row, drafts] = self._behind(row, drafts)
        return self.known[row, drafts]

    def _behind(self, row: int, drafts: tuple[int, ...]) -> bytes | None:
        request = self.requests[self.rows[row].request_id]
        if request.grammar is None or request.state is RequestState.FINISHED:
            return None
        before = self.behind(row, drafts[:-1]) if drafts else None
        if drafts and (before is None or not _allows(before, drafts[-1])):
            return None
        mask = _mask(request.grammar, [*request.output_tokens, *drafts])
        return mask if before is None or mask is None or len(mask) == len(before) else None

    def behind_each(self, row: int, drafted: Drafted) -> bytes:
        """The masks behind each draft token of a row, joined; zeros where the draft token is cut."""
        paths: list[tuple[int, ...]] = [()]  # by 1 + the number of the draft token
        for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        nothing = bytes(len(self.behind(row, ()) or b""))
        return b"".join(self.behind(row, path) or nothing for path in paths[1:])


def allowed_drafts(request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
    """The drafts before the first that the request's grammar forbids. A grammar is a function of the output: wrong
    drafts leave nothing in it. A draft token behind which it has no mask is left out, too; if it is right, the next
    step samples it."""
    grammar, output, kept = request.grammar, list(request.output_tokens), 0
    assert grammar is not None
    mask = _mask(grammar, output)
    for token in drafts:
        if mask is None or not _allows(mask, token):
            break
        output.append(token)
        size, mask = len(mask), _mask(grammar, output)
        if mask is None or len(mask) != size:
            break
        kept += 1
    return tuple(drafts[:kept])


def _mask(grammar: Grammar, output: Sequence[int]) -> bytes | None:
    """The grammar's mask behind an output; None: there is none that allows a token. For the text itself, without
    drafts, `masks_of` asks again and raises the error."""
    try:
        mask = grammar.allowed(output)
    except Exception:
        return None  # a text that it was not made for: a draft may be any token
    return mask if isinstance(mask, bytes) and any(mask) else None


def _allows(mask: bytes, token: int) -> bool:
    return token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)
