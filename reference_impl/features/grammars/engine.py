"""Grammars in an engine (guided decoding): a step whose rows sample under one is announced to the worker
(`Step.takes_masks`), which then samples only when the masks have come. What they allow depends on the tokens of the
step before; so with several steps in flight they are sent when that step is collected. Drafts may stand in such a
row, as far as the grammar allows them: each of its positions has a mask of its own (`drafts.py`).

Source: XGrammar (Dong et al. 2024) masks logits so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import EngineFeature, Flight
from reference_impl.features.grammars.drafts import Drafted, DraftsLater, StepMasks, are_bound, worker_drafts
from reference_impl.interfaces import Executor, Grammar, Masks, Request, RequestState, Step, StepPlan, TakesMasks


class Masking(EngineFeature):
    def __init__(self, engine: Engine):
        self.engine = engine

    def message(self, step: Step, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """The step, with takes_masks if one of its rows samples under a grammar; a `DraftsLater` if drafts depend on
        the grammar, unless it is submitted while another step runs."""
        if not any(row.samples and requests[row.request_id].grammar is not None for row in plan.rows):
            return step
        step = replace(step, takes_masks=True)
        return step if self.engine.depth > 1 or not are_bound(plan.rows, requests) else DraftsLater(**vars(step))

    def submitted(self, flight: Flight) -> None:
        """Sends the masks. The step before, whose tokens decide what grammars allow in this one, was collected."""
        if flight.step.takes_masks:
            executor, plan, requests = self.engine.executor, flight.plan, flight.requests
            assert isinstance(executor, TakesMasks)  # or the request would not have been added
            masks = StepMasks(plan, requests)
            drafts = worker_drafts(executor, flight.ticket, plan, requests, masks)
            executor.finish(flight.ticket, masks_of(plan, requests, masks, drafts))


def check_grammar(grammar: Grammar | None, executor: Executor) -> None:
    """Raises ValueError if there is a grammar and the executor cannot sample under one."""
    if grammar is not None and not isinstance(executor, TakesMasks):
        raise ValueError(
            f"grammar: {type(executor).__name__} samples without masks; it needs finish(ticket, masks), as "
            "LocalExecutor has"
        )


def masks_of(
    plan: StepPlan, requests: Mapping[str, Request], masks: StepMasks, drafts: Sequence[Drafted] | None
) -> Masks:
    """The masks of what each row may sample; None for a row without a grammar, or whose request has ended. drafts: the
    worker's, for each row. TypeError for a grammar that returns None."""
    rows: list[bytes | None] = []
    for number, row in enumerate(plan.rows):
        request, mask = requests[row.request_id], None
        if row.samples and request.grammar is not None and request.state is not RequestState.FINISHED:
            output = list(request.output_tokens)
            mask = masks.known.get((number, ())) or request.grammar.allowed(output)
            if mask is None:
                name = type(request.grammar).__name__
                raise TypeError(
                    f"request {request.id!r}: {name}.allowed returned None: expected bytes, a bit per token"
                )
            if drafts is not None and not row.drafts and isinstance(mask, bytes):
                masks.known[number, ()] = mask
                mask += masks.behind_each(number, drafts[number])
            for i in range(len(row.drafts)):  # behind each draft token its own
                mask += request.grammar.allowed([*output, *row.drafts[: i + 1]])
        rows.append(mask)
    return Masks(plan.step_id, tuple(rows))
