"""`inferlab bench widgets`: how long a widget takes to redraw when one of its controls is moved. Goal: under 200 ms.

Each control of each widget is moved to both ends and back, as a learner does; a redraw ends when the picture is there.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import typer

GOAL_MS = 200.0


def widgets(
    rounds: Annotated[int, typer.Option(min=1, help="Times that every control is moved, after one warm-up.")] = 3,
    save: Annotated[bool, typer.Option(help="Write reference_impl/bench/results/widgets.json.")] = False,
) -> None:
    """The course's widgets: milliseconds per redraw, every control at both of its ends."""
    from reference_impl.bench import harness

    measured = run(rounds)
    for name, row in measured.items():
        typer.echo(f"{name:<16}{row['median']:>7.0f} ms median {row['max']:>7.0f} ms worst, {row['runs']} redraws")
    if save:
        result = {"stamp": harness.stamp(), "goal_ms": GOAL_MS, "redraw_ms": measured}
        typer.echo(f"wrote {harness.save('widgets', result)}")


def run(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds per redraw of each widget: median, min, max, runs."""
    return {name: _redraws(view, rounds) for name, view in _views().items()}


def _views() -> dict[str, Any]:
    """Every widget that redraws; the timeline shows a trace of the real engine."""
    import numpy as np

    from chapters import widgets as made
    from chapters.widgets.size_speed_quality import Method
    from reference_impl.bench import under_load as loads

    alone = (
        "attention_traffic", "expert_load", "fewer_bits", "kv_memory", "latency_budget", "layout_explorer", "occupancy",
        "ring_stepper", "roofline", "savings", "speculation", "stages",
    )  # fmt: skip
    recorded: Any = loads.recorded()  # lines of the bench's own class, with the same fields
    normal = np.random.default_rng(0).standard_normal((256, 768))
    return {name: getattr(made, name)() for name in alone} | {
        "under_load": made.under_load(recorded, loads.short_run, loads.alone()),
        "outliers": made.outliers({"normal": normal}),
        "rounding": made.rounding({"normal": normal}),
        "size_speed_quality": made.size_speed_quality({f"method {n}": Method(2 + n / 3, 2.0**-n) for n in range(19)}),
        "sampling": made.sampling(_distribution, [str(i) for i in range(4096)]),
        "tile_stepper": made.tile_stepper(_tiles()),
        "timeline": made.timeline(_trace()),
    }


def _distribution(temperature: float, top_k: int, top_p: float) -> Any:
    """The engine's own filters over a vocabulary of the course model's size."""
    import torch

    from reference_impl import SamplingParams
    from reference_impl.assembly.sampler import probabilities

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return probabilities(torch.linspace(8, -8, 4096)[None], [params])[0].numpy()


def _tiles() -> Any:
    import numpy as np

    from reference_impl.theory.online_softmax import record

    rng = np.random.default_rng(0)
    return record(rng.standard_normal((8, 40)), rng.standard_normal((40, 6)), 8)


def _trace() -> Any:
    from reference_impl import LLM, SamplingParams, course_model

    llm = LLM(course_model("draft"), kv_cache_bytes=2**20, max_num_batched_tokens=64)
    llm.generate([list(range(3, 3 + 20 * n)) for n in range(1, 13)], SamplingParams(max_tokens=16, seed=0))
    return llm.engine.trace


def _redraws(view: Any, rounds: int) -> dict[str, float]:
    milliseconds = []
    for turn in range(rounds + 1):
        for control in view.controls.values():
            before = control.value
            for value in (*_ends(control), before):
                if value == control.value:
                    continue
                began = time.perf_counter()
                control.value = value
                if turn:
                    milliseconds.append((time.perf_counter() - began) * 1e3)
    return {
        "median": round(statistics.median(milliseconds), 1),
        "min": round(min(milliseconds), 1),
        "max": round(max(milliseconds), 1),
        "runs": len(milliseconds),
    }


def _ends(control: Any) -> tuple[Any, Any]:
    """The first and last value that a control can take."""
    if hasattr(control, "options"):
        values = [value for _, value in control._options_full]
        return values[0], values[-1]
    return control.min, control.max
