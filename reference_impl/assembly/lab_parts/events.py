"""An engine's trace as a log of single events, and a clock that runs the same way every time."""

from __future__ import annotations

from reference_impl.observe.trace import RequestArrived, RequestFinished, Trace


def events_of(trace: Trace) -> list[tuple[float, str, str]]:
    """The events of a trace, (seconds, kind, request id), in the order of time. kind: arrived; scheduled, when a
    request that waited begins to be computed; token; finished, or aborted."""
    events, waiting = [], set()
    for event in trace.events:
        if isinstance(event, RequestArrived):
            waiting.add(event.request_id)
            events.append((event.time, "arrived", event.request_id))
        elif isinstance(event, RequestFinished):
            events.append((event.time, "aborted" if event.reason == "abort" else "finished", event.request_id))
        else:  # a step
            waiting.update(event.preempted)
            for row in event.rows:
                if row.request_id in waiting:
                    waiting.remove(row.request_id)
                    events.append((event.started_at, "scheduled", row.request_id))
            events += [(event.finished_at, "token", row.request_id) for row in event.rows if row.samples]
    return sorted(events, key=lambda event: event[0])


class MovingClock:
    """A Clock that moves on by some milliseconds, the same in each run, whenever it is read. start: seconds."""

    def __init__(self, start: float):
        self.time, self.num_reads = start, 0

    def now(self) -> float:
        self.num_reads += 1
        self.time += 0.001 * (1 + self.num_reads * self.num_reads % 101)
        return self.time
