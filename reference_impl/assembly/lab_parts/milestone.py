"""What a learner's part has served: the texts, and what serving them took, counted by the engine's own trace."""

from __future__ import annotations

from reference_impl.assembly.lab_parts.serving import LabEngine
from reference_impl.core.llm import LLM


def show_served(claim: str, engine: LabEngine, llm: LLM) -> None:
    """Prints the claim, each request's prompt with the text that it got, and the numbers. Call it after the run.

    Tokens computed are those that a request had before the step; drafts, where there were any, stand beside them.

    ValueError where a request has no token: then nothing was served.
    """
    if not engine.requests or not all(request.output_tokens for request in engine.requests):
        raise ValueError(
            "show_served: expected requests that are finished, got one without a token: run the engine first"
        )
    assert llm.tokenizer is not None, "a course model has one"
    print(f"{claim}:\n")
    for request in engine.requests:
        print(llm.tokenizer.decode(request.tokens).rstrip("\n") + "\n")
    steps = engine.trace.steps()
    computed = f"{sum(row.num_tokens for step in steps for row in step.rows)} tokens"
    if num_drafts := sum(row.num_drafts for step in steps for row in step.rows):
        computed += f" and {num_drafts} draft tokens"
    sampled = sum(len(request.output_tokens) for request in engine.requests)
    together = max(len(step.rows) for step in steps)
    total = engine.engine.num_blocks
    most = total - min(step.num_free_blocks for step in steps)
    print(
        f"{sampled} new tokens in {len(steps)} steps; {computed} computed; at most {together} "
        f"request{'' if together == 1 else 's'} in a step, and {most} of {total} blocks in use after one."
    )
