"""Loads for servers and simulators: streams of requests with lengths, arrivals and shared text, and no text.

    for request in workload("chat", seed=1, rate=4.0, num_requests=1000): ...

Six documented workloads lie in datasets/traces (see its README); a path names one of your own, or a recorded trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from reference_impl.simulation.workloads.arrivals import Bursty, ClosedLoop, Diurnal, Open, Poisson, choose
from reference_impl.simulation.workloads.jsonl import read_jsonl, write_jsonl
from reference_impl.simulation.workloads.pages import tokens_of
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest
from reference_impl.simulation.workloads.spec import Workload, WorkloadError, read_workload
from reference_impl.simulation.workloads.stream import closed_stream, open_stream

__all__ = [
    "PAGE_TOKENS",
    "Bursty",
    "ClosedLoop",
    "Diurnal",
    "Poisson",
    "Workload",
    "WorkloadError",
    "WorkloadRequest",
    "names",
    "read_jsonl",
    "read_workload",
    "tokens_of",
    "traces_folder",
    "workload",
    "write_jsonl",
]


def workload(
    name_or_path: str | Path,
    *,
    seed: int = 0,
    rate: float | None = None,
    num_requests: int | None = None,
    arrivals: str | Open | ClosedLoop | None = None,
) -> Iterator[WorkloadRequest]:
    """The requests of a workload, one after another and never a list; the same for the same arguments on any machine.

    name_or_path: one of names(), a .yaml file like theirs, or a .jsonl file that write_jsonl wrote.
    seed: other users of the same service: what tenants and documents share stays the same. rate: requests per second,
    in place of the workload's own. num_requests: None does not end. arrivals: "poisson", "bursty", "diurnal",
    "closed_loop", or a Poisson, Bursty, Diurnal or ClosedLoop.
    A .jsonl file is read as it is: seed, rate and arrivals do not apply. ValueError, WorkloadError: at the call, except
    for the lines of a .jsonl file, which are checked as they are read.
    """
    if num_requests is not None and num_requests < 0:
        raise ValueError(f"num_requests: expected 0 or more, got {num_requests}")
    path = Path(name_or_path)
    if path.suffix == ".jsonl":
        if seed or rate is not None or arrivals is not None:
            raise ValueError(f"{path}: a recorded trace has its own arrivals; seed, rate and arrivals do not apply")
        return islice(read_jsonl(path), num_requests)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: expected an integer from 0 on, got {seed!r}")
    spec = read_workload(_file(name_or_path))
    process = choose(spec.arrivals, arrivals, rate)
    if isinstance(process, ClosedLoop):
        return islice(closed_stream(spec, process, seed), num_requests)
    return islice(open_stream(spec, process, seed), num_requests)


def names() -> list[str]:
    """The workloads that come with the course."""
    return sorted(path.stem for path in traces_folder().glob("*.yaml"))


def traces_folder() -> Path:
    """Folder of the workloads: in the checkout, or installed with the package."""
    package = Path(__file__).resolve().parents[2]
    places = (package.parent / "datasets" / "traces", package.parent / "inferlab_data" / "traces")
    for place in places:
        if (place / "chat.yaml").is_file():
            return place
    raise FileNotFoundError(f"workloads not found; looked in {' and '.join(map(str, places))}")


def _file(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return path
    if str(name_or_path) in names():
        return traces_folder() / f"{name_or_path}.yaml"
    raise ValueError(f"unknown workload {str(name_or_path)!r}: expected {', '.join(names())}, a .yaml or a .jsonl file")
