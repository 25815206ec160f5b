"""Measured figures of the workloads: the tables of datasets/traces/README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from reference_impl.simulation.workloads import names, read_workload, traces_folder, workload
from reference_impl.simulation.workloads.arrivals import ClosedLoop, Open
from reference_impl.simulation.workloads.distributions import Drawn, bits
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest
from reference_impl.simulation.workloads.spec import Workload

BEGIN, END = "<!-- begin: python -m reference_impl.simulation.workloads table -->", "<!-- end -->"
NUM_REQUESTS, NUM_DRAWS = 20_000, 100_000


@dataclass(frozen=True)
class Measured:
    """Figures of a stream. prompt, output: mean, p50, p99 tokens. cv: of the gaps between arrivals.

    shared: part of the prompt tokens that lie in pages which an earlier request had too (a cache that forgets nothing).
    """

    prompt: tuple[float, float, float]
    output: tuple[float, float, float]
    images: float
    later_turns: float
    shared: float
    cv: float


def measure(requests: Iterable[WorkloadRequest]) -> Measured:
    """Figures of all these requests. It keeps every page, so give it thousands and not millions."""
    prompts, outputs, images, arrivals = [], [], [], []
    seen: set[int] = set()
    later = found = 0
    for r in requests:
        prompts.append(r.num_prompt_tokens)
        outputs.append(r.num_output_tokens)
        images.append(r.images)
        arrivals.append(r.arrival)
        later += r.session != "" and not r.id.endswith(".1")
        found += sum(page in seen for page in r.pages)  # chained: a known page has known ones before it
        seen.update(r.pages)
    gaps = np.diff(arrivals)
    cv = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else 0.0
    num = len(prompts)
    return Measured(
        _summary(np.array(prompts)), _summary(np.array(outputs)), sum(images) / num, later / num,
        found * PAGE_TOKENS / sum(prompts), cv,
    )  # fmt: skip


def tables() -> str:
    """The tables in Markdown: all workloads as streams, then each workload field by field."""
    specs = [read_workload(traces_folder() / f"{name}.yaml") for name in names()]
    lines = [
        f"{NUM_REQUESTS:,} requests of each, seed 0; mean / p50 / p99. Later turns: requests that are not the first "
        f"of their session. Shared: prompt tokens in pages of {PAGE_TOKENS} that an earlier request had too, "
        "if nothing is ever evicted. CV: coefficient of variation of the gaps between arrivals.",
        "",
        "| workload | arrivals | prompt tokens | output tokens | images | later turns | shared | CV |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [line_of(spec) for spec in specs]
    return "\n".join(lines) + "\n" + "".join(section_of(spec) for spec in specs)


def line_of(spec: Workload) -> str:
    """The workload's line in the table of all workloads."""
    m = measure(workload(spec.name, num_requests=NUM_REQUESTS))
    cv = "–" if isinstance(spec.arrivals, ClosedLoop) else f"{m.cv:.2f}"
    return (
        f"| {spec.name} | {_arrivals(spec.arrivals)} | {_three(m.prompt)} | {_three(m.output)} | {m.images:.2f} | "
        f"{m.later_turns:.0%} | {m.shared:.0%} | {cv} |"
    )


def section_of(spec: Workload) -> str:
    lines = ["", f"### {spec.name}", "", spec.about, ""]
    lines += ["| field | is | mean / p50 / p99 | where from |", "|---|---|---|---|"]
    lines += [f"| {field} | {what} | {figures} | {why} |" for field, what, figures, why in _fields(spec)]
    return "\n".join(lines) + "\n"


def _fields(spec: Workload) -> Iterator[tuple[str, str, str, str]]:
    for field, value in _leaves("", spec):
        if isinstance(value, Drawn):
            yield field, _formula(value), _three(_drawn(value, seconds=field == "think")), _why(value)
        elif isinstance(value, Open | ClosedLoop):
            yield field, _arrivals(value), "", _why(value)
        else:
            own = {k: v for k, v in value.model_dump().items() if not isinstance(v, dict)}
            yield field, _parameters(own), "", _why(value)


def _leaves(prefix: str, model: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield prefix + name, value
            yield from _leaves(f"{prefix}{name}.", value)


def _drawn(distribution: Drawn, seconds: bool) -> tuple[float, float, float]:
    values = distribution.sample(bits(0), NUM_DRAWS)
    return _summary(values if seconds else np.floor(values + 0.5))


def _summary(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> tuple[float, float, float]:
    return float(np.mean(values)), float(np.percentile(values, 50)), float(np.percentile(values, 99))


def _three(figures: tuple[float, float, float]) -> str:
    return " / ".join(f"{x:,.0f}" if x >= 20 else f"{x:.3g}" for x in figures)


def _formula(distribution: Drawn) -> str:
    own = distribution.model_dump(by_alias=True, exclude={"source", "because", "distribution", "min", "max"})
    limits = {"min": distribution.min or None, "max": distribution.max}
    return f"{distribution.distribution}: {_parameters(own | limits)}"  # type: ignore[attr-defined]


def _arrivals(process: Open | ClosedLoop) -> str:
    return f"{process.process}: {_parameters(process.model_dump(exclude={'process'}))}"


def _parameters(values: dict[str, object]) -> str:
    kept = {k: v for k, v in values.items() if k not in ("source", "because") and v is not None}
    return ", ".join(f"{k} {_shown(v)}" for k, v in kept.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _why(value: BaseModel) -> str:
    source, because = getattr(value, "source", "").strip(), getattr(value, "because", "").strip()
    return "; ".join(part for part in (source, f"our choice, because: {because}" if because else "") if part)
