"""Two clocks on one axis: the profiler's, and the engine's.

Around each profiled step the engine's clock is read, just before the profiler's annotation begins and just after it has
ended. So for an offset (engine's time = profiler's time + offset) every step says: before - start <= offset, and
offset <= after - end. What all steps allow is an interval; its middle is the offset, half its width the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reference_impl.observe.perfetto import ENGINE, REQUESTS, to_perfetto
from reference_impl.observe.trace import StepDone, Trace

_BESIDE = 1 << 20  # added to the engine's process numbers: the profiler uses those of the system, and of GPUs


@dataclass(frozen=True)
class Alignment:
    """An offset between the clocks, in seconds. error: by how much it may be wrong, either way."""

    offset: float
    error: float

    @classmethod
    def of(cls, annotations: Sequence[tuple[float, float]], brackets: Sequence[tuple[float, float]]) -> Alignment:
        """The offset that suits all steps. annotations: (start, end) of each step on the profiler's clock; brackets:
        readings of the engine's around it.

        Raises ValueError where no offset suits all steps: the clocks do not run alike.
        """
        pairs = list(zip(annotations, brackets, strict=True))
        low = max(before - start for (start, _), (before, _) in pairs)
        high = min(after - end for (_, end), (_, after) in pairs)
        if low > high:
            raise ValueError(
                f"the clocks of the profiler and the engine drift apart: by {low - high:.9f} s in these steps"
            )
        return cls((low + high) / 2, (high - low) / 2)


def merged(trace: Trace, profiled: dict[str, Any], alignment: Alignment) -> dict[str, Any]:
    """One file for ui.perfetto.dev with the engine's steps and requests, and what the profiler saw.

    Times are microseconds from the first event of the engine's trace.
    """
    content = to_perfetto(trace)
    zero = min(e.started_at if isinstance(e, StepDone) else e.time for e in trace.events)
    for event in content["traceEvents"]:
        event["pid"] += _BESIDE
    order = [
        {
            "name": "process_sort_index",
            "ph": "M",
            "ts": 0,
            "pid": pid + _BESIDE,
            "tid": 0,
            "args": {"sort_index": pid - 9},
        }
        for pid in (ENGINE, REQUESTS)
    ]
    shift = (alignment.offset - zero) * 1e6
    theirs = [event | {"ts": event["ts"] + shift} for event in profiled["traceEvents"] if "ts" in event]
    return {"traceEvents": content["traceEvents"] + order + theirs, "displayTimeUnit": "ms"}
