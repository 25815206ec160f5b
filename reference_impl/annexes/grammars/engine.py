"""Grammars in an engine (guided decoding): a step whose rows sample under one is announced to the worker
(`Step.takes_masks`), which then samples only when the masks have come. What they allow depends on the tokens of the
step before; so with several steps in flight they are sent when that step is collected. Guesses may stand in such a
row, as far as the grammar allows them: each of its positions has a mask of its own. Those of the host are cut before
the step is planned; those of the worker, a chain or a tree, are made with it and asked for, and one whose mask allows
nothing is cut, with all behind it.

`announced` follows `Planner.step`, and `masks_of` the submission. Source: XGrammar (Dong et al. 2024) masks logits so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from reference_impl.interfaces import Executor, Grammar, Masks, Request, RequestState, Step, StepPlan, TakesMasks


class Guessed(NamedTuple):
    """Of a row. parents: of each guess the one before it, an earlier one; -1: the row's last known token."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()


@runtime_checkable
class ShowsGuesses(Protocol):
    """An executor whose guesses the host can see before it sends masks."""

    def guesses(self, ticket: Any) -> Sequence[Guessed]:
        """Of each row of a step that waits for masks. Waits for what guesses, and not for the model."""
        ...


def shown_guesses(executor: Executor, ticket: Any, plan: StepPlan, requests: Mapping[str, Request]) -> Any:
    """As of `masks_of`, where masks depend on the worker's guesses."""
    asks = [row.num_drafts and not row.drafts and requests[row.request_id].grammar is not None for row in plan.rows]
    if not any(asks):
        return None
    assert isinstance(executor, ShowsGuesses)  # or there would be none in such a row
    return executor.guesses(ticket)


def check_grammar(grammar: Grammar | None, executor: Executor) -> None:
    """ValueError where the executor cannot sample under one."""
    if grammar is not None and not isinstance(executor, TakesMasks):
        raise ValueError(
            f"grammar: {type(executor).__name__} samples without masks; it needs finish(ticket, masks), as "
            "LocalExecutor has"
        )


def announced(step: Step, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
    """The step, with takes_masks where one of its rows samples under a grammar."""
    takes_masks = any(row.samples and requests[row.request_id].grammar is not None for row in plan.rows)
    return replace(step, takes_masks=True) if takes_masks else step


def masks_of(plan: StepPlan, requests: Mapping[str, Request], guesses: Sequence[Guessed] | None = None) -> Masks:
    """What each row may sample now. A request that has ended by now has no use for its own. guesses: the worker's, of
    each row; as of `masks_behind`. TypeError for a grammar that gives no bytes."""
    masks: list[bytes | None] = []
    for number, row in enumerate(plan.rows):
        request, mask = requests[row.request_id], None
        if row.samples and request.grammar is not None and request.state is not RequestState.FINISHED:
            mask = request.grammar.allowed(output := list(request.output_tokens))
            if mask is None:
                name = type(request.grammar).__name__
                raise TypeError(
                    f"request {request.id!r}: {name}.allowed returned None: expected bytes, a bit per token"
                )
            if guesses is not None and not row.drafts and isinstance(mask, bytes):
                mask += masks_behind(request, mask, guesses[number])
            for i in range(len(row.drafts)):  # behind each guess its own
                mask += request.grammar.allowed([*output, *row.drafts[: i + 1]])
        masks.append(mask)
    return Masks(plan.step_id, tuple(masks))


def masks_behind(request: Request, mask: bytes, guessed: Guessed) -> bytes:
    """Of each guess the mask of what may follow it and all on its path, one mask behind another; zeros where the guess
    is cut: the grammar forbids it, or one on its path, or has no mask behind it. mask: that before the first guess."""
    assert request.grammar is not None
    nothing, found = bytes(len(mask)), [mask]  # by 1 + the guess
    paths = [list(request.output_tokens)]
    known: dict[tuple[int, ...], bytes] = {}  # paths of a tree may bear one text
    for token, parent in zip(guessed.tokens, guessed.parents, strict=True):
        paths.append([*paths[1 + parent], token])
        behind = nothing
        if _allows(found[1 + parent], token):
            if (text := tuple(paths[-1])) not in known:
                known[text] = _mask(request.grammar, paths[-1]) or nothing
            behind = known[text]
        found.append(behind if len(behind) == len(mask) else nothing)
    return b"".join(found[1:])


def allowed_guesses(request: Request, guesses: Sequence[int]) -> tuple[int, ...]:
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
