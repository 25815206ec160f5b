"""A Dask cluster as the executor of a run: `--executor dask://HOST:PORT` names its scheduler.

Dask carries jobs, with hidden tests and the secret in them, by pickle and without encryption: scheduler, workers and
the network between them belong to the instructor. A learner's code stays in the sandbox of the worker that runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from grader.course import CourseError
from grader.examination.worker import Setup, WorkerError, check_worker, close_servers
from grader.saying import install

CONNECT_SECONDS = 20.0


@contextlib.contextmanager
def cluster(address: str, setup: Setup) -> Iterator[tuple[Executor, int]]:
    """An executor on the cluster at dask://HOST:PORT, and how many submissions it grades at once.

    Raises CourseError where there is none, or where one of its workers cannot grade as this machine would.
    """
    scheme, _, place = address.partition("://")
    if scheme != "dask" or not place:
        raise CourseError(f"--executor {address}: expected dask://HOST:PORT, the address of a Dask scheduler")
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise CourseError(f"grading on a Dask cluster needs an extra: {install('cluster')}") from None
    try:
        client = Client(f"tcp://{place}", timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise CourseError(f"no Dask scheduler answers at {place}: {error}") from None
    with client:
        slots = _check_workers(client, address, setup)
        executor = client.get_executor(pure=False)
        try:
            yield executor, slots
        finally:
            executor.shutdown(wait=False)
            with contextlib.suppress(Exception):  # a cluster that is gone has nothing to end
                client.run(close_servers, setup.key)


def _check_workers(client: Any, address: str, setup: Setup) -> int:
    """How many tasks the cluster runs at once. Before the first submission, every worker starts an examiner server."""
    threads: dict[str, int] = client.nthreads()
    if not threads:
        raise CourseError(f"{address} has no workers; start some: dask worker HOST:PORT --nthreads 1")
    try:
        checks = [client.submit(check_worker, setup, workers=[worker], pure=False) for worker in threads]
        client.gather(checks)
    except WorkerError as error:
        raise CourseError(str(error)) from None
    except Exception as error:
        raise CourseError(
            f"a worker of {address} cannot grade: {type(error).__name__}: {error}. Every worker needs inferlab[grade] "
            "in the version that is installed here"
        ) from None
    return sum(threads.values())
