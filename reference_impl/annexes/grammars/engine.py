"""Grammars in an engine (guided decoding): a step whose rows sample under one is announced to the worker
(`Step.takes_masks`), which then samples only when the masks have come. What they allow depends on the tokens of the
step before; so with several steps in flight they are sent when that step is collected.

`announced` follows `Planner.step`, and `masks_of` the submission. Source: XGrammar (Dong et al. 2024) masks logits so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reference_impl.interfaces import Executor, Grammar, Masks, Request, RequestState, Step, StepPlan, TakesMasks


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


def masks_of(plan: StepPlan, requests: Mapping[str, Request]) -> Masks:
    """What each row may sample now. A request that has ended by now has no use for its own. TypeError for a grammar
    that gives no bytes."""
    masks: list[bytes | None] = []
    for row in plan.rows:
        request, mask = requests[row.request_id], None
        if row.samples and request.grammar is not None and request.state is not RequestState.FINISHED:
            mask = request.grammar.allowed(request.output_tokens)
            if mask is None:
                name = type(request.grammar).__name__
                raise TypeError(
                    f"request {request.id!r}: {name}.allowed returned None: expected bytes, a bit per token"
                )
        masks.append(mask)
    return Masks(plan.step_id, tuple(masks))
