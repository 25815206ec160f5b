"""What grammars allow behind guesses. A guess has a mask of its own, that of the text with it and all before it; one
that is forbidden, or behind which there is no mask, is cut, with all behind it.

Guesses of the host are cut before the step is planned (`allowed_drafts`). Those of the worker, a chain or a tree, come
back before masks are sent (`ShowsDrafts`). A model that guesses has its logits masked, too, while it guesses: then it
asks for masks, and makes no guess that is forbidden. That is worth a wait only where the host has nothing else to do,
so it is done where one step is in flight (`DraftsLater`), and not where the next is submitted while one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from reference_impl.interfaces import Executor, Grammar, Request, RequestState, Row, Step, StepPlan

# (row of the step, guesses of the step before a position) of several positions -> of each the mask there; None:
# anything, or a text that is forbidden.
AskMasks: TypeAlias = Callable[[Sequence[tuple[int, tuple[int, ...]]]], Sequence[bytes | None]]


class Drafted(NamedTuple):
    """Of a row. parents: of each guess the one before it, an earlier one; -1: the row's last known token."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass(frozen=True)
class DraftsLater(Step):
    """A step whose drafts may wait until `show_drafts` is called, where a draft model's masks can be asked for."""


@runtime_checkable
class ShowsDrafts(Protocol):
    """An executor whose guesses the host can see before it sends masks."""

    def show_drafts(self, ticket: Any, ask: AskMasks) -> Sequence[Drafted]:
        """Of each row of a step that waits for masks. Waits for what guesses, and not for the model. ask: for a step
        that `DraftsLater`, called before this returns."""
        ...


def are_bound(rows: Sequence[Row], requests: Mapping[str, Request]) -> bool:
    """Whether the worker makes guesses for requests under a grammar."""
    return any(
        row.num_drafts and not row.drafts and requests[row.request_id].grammar is not None for row in rows
    )  # fmt: skip


def worker_drafts(
    executor: Executor, ticket: Any, plan: StepPlan, requests: Mapping[str, Request], ask: AskMasks
) -> Sequence[Drafted] | None:
    """None: no mask depends on guesses of the worker."""
    if not are_bound(plan.rows, requests):
        return None
    assert isinstance(executor, ShowsDrafts)  # or there would be none in such a row
    return executor.show_drafts(ticket, ask)


class StepMasks:
    """The masks of a step's rows. A grammar is asked about a text once, and about none that it forbids: a guess is cut
    there. Called, it is an `AskMasks`."""

    def __init__(self, plan: StepPlan, requests: Mapping[str, Request]):
        self.rows, self.requests = plan.rows, requests
        self.known: dict[tuple[int, tuple[int, ...]], bytes | None] = {}  # by row and guesses

    def __call__(self, texts: Sequence[tuple[int, tuple[int, ...]]]) -> list[bytes | None]:
        return [self.behind(row, guesses) for row, guesses in texts]

    def behind(self, row: int, guesses: tuple[int, ...]) -> bytes | None:
        """None: there is none."""
        if (row, guesses) not in self.known:
            self.known[row, guesses] = self._behind(row, guesses)
        return self.known[row, guesses]

    def _behind(self, row: int, guesses: tuple[int, ...]) -> bytes | None:
        request = self.requests[self.rows[row].request_id]
        if request.grammar is None or request.state is RequestState.FINISHED:
            return None
        before = self.behind(row, guesses[:-1]) if guesses else None
        if guesses and (before is None or not _allows(before, guesses[-1])):
            return None
        mask = _mask(request.grammar, [*request.output_tokens, *guesses])
        return mask if before is None or mask is None or len(mask) == len(before) else None

    def behind_each(self, row: int, guessed: Drafted) -> bytes:
        """One mask behind another; zeros where the guess is cut."""
        paths: list[tuple[int, ...]] = [()]  # by 1 + the guess
        for token, parent in zip(guessed.tokens, guessed.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        nothing = bytes(len(self.behind(row, ()) or b""))
        return b"".join(self.behind(row, path) or nothing for path in paths[1:])


def allowed_drafts(request: Request, guesses: Sequence[int]) -> tuple[int, ...]:
    """Those before the first that the request's grammar forbids. A grammar is a function of the output: wrong guesses
    leave nothing in it. A guess behind which it has no mask is left out, too; if it is right, the next step says so."""
    grammar, output, kept = request.grammar, list(request.output_tokens), 0
    assert grammar is not None
    mask = _mask(grammar, output)
    for token in guesses:
        if mask is None or not _allows(mask, token):
            break
        output.append(token)
        size, mask = len(mask), _mask(grammar, output)
        if mask is None or len(mask) != size:
            break
        kept += 1
    return tuple(guesses[:kept])


def _mask(grammar: Grammar, output: Sequence[int]) -> bytes | None:
    """None: none that could be sampled under. Of the text itself `masks_of` asks again, and says what is wrong."""
    try:
        mask = grammar.allowed(output)
    except Exception:
        return None  # a text that it was not made for: a guess may be any
    return mask if isinstance(mask, bytes) and any(mask) else None


def _allows(mask: bytes, token: int) -> bool:
    return token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)
