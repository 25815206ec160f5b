"""Where the time of a step goes: torch's profiler around it, its result against the theory, a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args


def run(
    folder: Path | None,
    phase: str,
    batch: int,
    context: int,
    steps: int,
    file: Path | None,
    *,
    shape: str | None,
    **options: Any,
) -> None:
    """Profiles, explains, and writes the timeline, for `inferlab profile`. Options are those of LLM.

    folder: of the model; None: random weights in `shape`.

    Raises ValueError for what cannot be, OSError for what cannot be read or written.
    """
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch begins: its profiler writes to stderr
    import json

    from rich.console import Console

    from reference_impl.assembly.llm import LLM
    from reference_impl.bench.profiling.alignment import merged
    from reference_impl.bench.profiling.record import Phase, num_tokens, record
    from reference_impl.bench.profiling.report import show

    if phase not in get_args(Phase):
        raise ValueError(f"phase: expected {' or '.join(get_args(Phase))}, got {phase!r}")
    if options.get("worker", "here") != "here":
        raise ValueError(f"--worker {options['worker']}: only this process can be profiled, leave it out")
    for size, option in (("tensor_parallel_size", "--tp"), ("pipeline_parallel_size", "--pp")):
        if options.get(size, 1) > 1:
            raise ValueError(f"{option}: only one process can be profiled, leave it out")
    budget = max(2048, batch * context) if phase == "prefill" else 2048
    length = context + num_tokens(batch, context, steps, budget)
    # Three times: overlapped, a step is planned while one runs, and the one before it gives its blocks back.
    options |= {"max_num_seqs": 3 * batch, "max_num_batched_tokens": budget}
    options["max_model_len"] = length  # a context that is too long is refused before the cache takes memory for it
    options["num_blocks"] = 3 * batch * -(-length // 16)
    llm = LLM(folder, **options) if shape is None else LLM(shape=shape, dummy_weights=True, **options)
    engine = llm.engine
    try:
        found = record(engine, phase, batch, context, steps)  # type: ignore[arg-type]  # looked at above
        show(engine, found, phase, batch, context, Console())  # type: ignore[arg-type]
    finally:
        engine.close()
    if file is not None:
        file.write_text(json.dumps(merged(engine.trace, found.file, found.alignment)))
        error = found.alignment.error * 1e6
        Console().print(f"\nwrote {file}: open it in ui.perfetto.dev (the two clocks agree to {error:.0f} us)")
