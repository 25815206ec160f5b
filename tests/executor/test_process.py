"""A worker in another process: the same texts, whatever happens on the way; and errors that name step and rank."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import load_worker, split_engine
from reference_impl.core.block_pool import BlockPool
from reference_impl.features.process import worker as process
from reference_impl.features.process import worker_main
from reference_impl.features.process.facts import PROTOCOL, Facts
from reference_impl.features.process.worker import WorkerError, WorkerProcess
from reference_impl.interfaces import Reply, Request, SamplingParams, Step, StepRow
from tests.executor.forked import kill
from tests.warm import Warm

FOLDER = course_model("draft")
CONFIG = EngineConfig(
    num_blocks=14, block_size=8, max_num_seqs=4, max_num_batched_tokens=24, preemption="swap", overlap="on"
)
ASKED = [
    ([5 + i, 17, 40 + i, 9] * (3 + i), SamplingParams(max_tokens=18, ignore_eos=True, **options))
    for i, options in enumerate(
        [
            {"temperature": 0},
            {"seed": 3, "logprobs": 2},
            {"seed": 4, "temperature": 1.3, "top_k": 40, "top_p": 0.9},
            {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"seed": 6, "n": 2},
        ]
    )
]


def serve(engine: Engine) -> list[Request]:
    firsts = [engine.add(prompt, sampling, f"r{i}") for i, (prompt, sampling) in enumerate(ASKED)]
    members = [member for first in firsts for member in (first, *first.children)]
    while engine.has_work():
        engine.step()
    return members


def step_on(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


@pytest.fixture(scope="module")
def expected() -> list[Request]:
    model = load_model(FOLDER, torch.float64)
    return serve(Engine(model, dataclasses.replace(CONFIG, overlap="off", num_blocks=60)))


@pytest.fixture
def split(forked_workers: None) -> Iterator[Any]:
    """split(**options): an engine whose worker's process is a fork."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(split_engine(FOLDER, dataclasses.replace(CONFIG, **options), dtype="float64"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert engine.executor._process.poll() is not None, "no process is left behind"


def test_the_texts_are_those_of_one_process(expected) -> None:
    """With preemption to the host, copies, chunks, penalties, samples and steps that overlap; the worker's process is
    started as it is in use."""
    engine = split_engine(FOLDER, CONFIG, dtype="float64")
    try:
        assert engine.overlaps
        assert engine.executor.pid != os.getpid()
        found = serve(engine)
    finally:
        engine.close()
    assert engine.executor._process.poll() is not None, "no process is left behind"
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps)
    assert any(step.transfers.swap_in for step in steps)
    for mine, its in zip(found, expected, strict=True):
        assert (mine.id, mine.tokens, mine.finish_reason) == (its.id, its.tokens, its.finish_reason)
        assert [r.token for r in mine.logprobs] == [r.token for r in its.logprobs]
        assert [r.logprob for r in mine.logprobs] == pytest.approx([r.logprob for r in its.logprobs], abs=1e-9)
    assert engine.kv.num_available == engine.num_blocks


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_killed_worker_is_named_and_its_requests_go_on_with_a_new_one(expected, split, overlap: str) -> None:
    engine = split(overlap=overlap)
    prompt, sampling = ASKED[1]
    sampling = dataclasses.replace(sampling, logprobs=None)
    request = engine.add(prompt, sampling, "r1")
    while len(request.output_tokens) < 7:
        engine.step()
    last = engine.trace.steps()[-1].step_id
    kill(engine.executor)
    with pytest.raises(WorkerError, match=r"worker 0 \(process \d+\) was killed by signal 9 \(SIGKILL\) before step"):
        step_on(engine)  # a step may have been done when the signal came
    so_far = list(request.tokens)
    assert so_far == expected[1].tokens[: len(so_far)]
    assert len(so_far) >= len(prompt) + 7
    assert engine.trace.steps()[-1].step_id >= last
    left = sampling.max_tokens - len(request.output_tokens)
    again = split(overlap=overlap)
    rest = again.add(so_far, dataclasses.replace(sampling, max_tokens=left))
    while again.has_work():
        again.step()
    assert rest.tokens == expected[1].tokens


def test_a_stopped_worker_is_an_error_in_time_and_is_ended() -> None:
    engine = split_engine(FOLDER, CONFIG)  # no fork: what stands for one would be stopped in its place
    try:
        engine.add(*ASKED[0], "r0")
        engine.step()
        os.kill(engine.executor.pid, signal.SIGSTOP)
        engine.executor.step_seconds = 0.5  # from here on nothing is answered, however fast the machine
        late = r"worker 0 \(process \d+\) had not answered step \d+ after 0.5 s, and was ended"
        with pytest.raises(WorkerError, match=late):
            step_on(engine)
        assert engine.executor._process.poll() is not None
    finally:
        engine.close()


STOPS = """
import os, signal, struct, sys

class Stops:
    max_in_flight = 1
    def submit(self, step): ...
    def collect(self, ticket):
        os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"the beginning of a reply")
        os.kill(os.getpid(), signal.SIGSTOP)
    def close(self): ...

def make():
    return Stops(), None
"""


@pytest.mark.parametrize(("what", "step_seconds"), [("step", 1), ("step", None), ("reply", 10**12)])
def test_a_stopped_worker_is_an_error_in_time_with_half_a_message(
    what: str, step_seconds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is longer than what a socket holds, also where steps have no limit; and a reply that was begun."""
    (tmp_path / "stops.py").write_text(STOPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "READING_SECONDS", 0.5)
    monkeypatch.setattr(process, "_MOST_SECONDS", 1.5)
    worker = WorkerProcess(importlib.import_module("stops").make, step_seconds=step_seconds)
    rows = tuple(StepRow(slot, 0, 1, True) for slot in range(15_000 if what == "step" else 1))
    if what == "step":
        os.kill(worker.pid, signal.SIGSTOP)
    done, seconds = "read" if what == "step" else "wholly answered", step_seconds or 0.5
    with pytest.raises(WorkerError, match=rf"had not {done} step 6 after {seconds} s, and was ended"):
        worker.collect(worker.submit(Step(6, rows=rows)))
    assert worker._process.poll() is not None
    worker.close()


PLANNER = """
import os, signal, sys
from functools import partial
from pathlib import Path
from reference_impl.features.process.worker import WorkerProcess
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.split import load_worker

make = partial(load_worker, Path(sys.argv[1]), "float32", "cpu", EngineConfig(num_blocks=14, block_size=8))
worker = WorkerProcess(make)
os.kill(worker.pid, signal.SIGSTOP)
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_stopped_worker_ends_with_its_planner_that_was_killed(warm: Warm) -> None:
    """The worker is no fork, as above."""
    with subprocess.Popen(
        warm.command(("-c", PLANNER, str(FOLDER))), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as planner:
        worker = int(planner.stdout.readline())
        planner.kill()
    end = time.monotonic() + 600
    while is_there(worker):
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether this process has not ended; where there is no parent that waits for it, it may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("forked_workers")
def test_the_error_of_a_killed_worker_has_step_and_rank() -> None:
    worker = WorkerProcess(partial(load_worker, FOLDER, "float32", "cpu", CONFIG), rank=3)
    try:
        kill(worker)
        with pytest.raises(WorkerError) as caught:
            worker.collect(worker.submit(Step(41)))
        assert (caught.value.step_id, caught.value.rank) == (41, 3)
    finally:
        worker.close()
        worker.close()


def test_a_step_that_fails_is_named_with_the_workers_own_traceback_and_the_worker_goes_on(expected, split) -> None:
    engine = split(overlap="off")
    nobody = Step(977, rows=(StepRow(2, 0, 1, True),))  # a slot that was never opened
    with pytest.raises(WorkerError, match=r"worker 0 failed in step 977:\nTraceback[\s\S]*KeyError: 2") as caught:
        engine.executor.collect(engine.executor.submit(nobody))
    assert caught.value.step_id == 977
    assert [r.tokens for r in serve(engine)] == [r.tokens for r in expected]


def test_steps_are_collected_in_order(split) -> None:
    executor = split().executor
    first, second = executor.submit(Step(1)), executor.submit(Step(2))
    with pytest.raises(RuntimeError, match=r"step 2 is collected, and in flight are \[1, 2\], oldest first"):
        executor.collect(second)
    assert [executor.collect(ticket).step_id for ticket in (first, second)] == [1, 2]
    with pytest.raises(RuntimeError, match=r"in flight are \[\]"):
        executor.collect(second)


def test_long_steps_and_long_replies_do_not_wait_for_each_other() -> None:
    """Both are longer than what a socket holds, and the second step is sent before the first reply is read."""

    class Long:
        max_in_flight = 1

        def submit(self, step: Step) -> Step:
            return step

        def collect(self, step: Step) -> Reply:
            return Reply(step.step_id, ((7,) * 400_000,), {}, 0.0, 0.0)

    mine, theirs = Pipe()
    threading.Thread(target=worker_main.serve, args=(theirs, Long()), daemon=True).start()

    def send() -> None:
        for number in (1, 2, 3):
            rows = tuple(StepRow(slot, 0, 1, True) for slot in range(20_000))
            mine.send_bytes(pickle.dumps(Step(number, rows=rows)))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(120)
    assert not sender.is_alive(), "the steps are not received while a reply is sent"
    assert [pickle.loads(mine.recv_bytes())[1].step_id for _ in range(3)] == [1, 2, 3]
    mine.close()


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_does_not_start_says_why() -> None:
    with pytest.raises(ValueError, match=r"no-such-folder.config\.json: no such file"):
        WorkerProcess(partial(load_worker, FOLDER / "no-such-folder", "float32", "cpu", CONFIG))
    with pytest.raises(WorkerError, match=r"worker 1 failed before it was ready:\nTraceback[\s\S]*no_such_dtype"):
        WorkerProcess(partial(load_worker, FOLDER, "no_such_dtype", "cpu", CONFIG), rank=1)
    with pytest.raises(WorkerError, match=r"worker 0 \(process \d+\) ended with code 7 before it was ready"):
        WorkerProcess(partial(os._exit, 7))


def test_a_worker_that_is_stopped_while_it_starts_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STARTING_SECONDS", 2.0)
    with pytest.raises(WorkerError, match=r"worker 3 \(process \d+\) gave no sign of life for 2 s while it started"):
        WorkerProcess(partial(signal.raise_signal, signal.SIGSTOP), rank=3)


@pytest.mark.usefixtures("forked_workers")
def test_one_that_takes_long_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signs of life come as long as it loads."""
    signs = []
    message = WorkerProcess._message
    monkeypatch.setattr(WorkerProcess, "_message", lambda self, step: (signs.append(step), message(self, step))[1])
    with pytest.raises(WorkerError, match="worker 0 failed before it was ready:\nTraceback"):
        WorkerProcess(partial(time.sleep, 3))
    assert len(signs) > 1


def test_a_worker_of_another_engine_is_refused(split) -> None:
    facts: Facts = split().executor.facts
    model = dataclasses.replace(facts.model, dtype="torch.float32")
    other = dataclasses.replace(facts, protocol=0, model=model, max_num_seqs=9, num_blocks=9)
    with pytest.raises(ValueError, match="belongs to another engine") as caught:
        facts.check(other)
    text = str(caught.value)
    assert f"protocol: expected {PROTOCOL}, the worker has 0" in text
    assert f"the worker has '{model.fingerprint}'" in text
    assert "max_num_seqs: expected 4, the worker has 9" in text
    assert "num_blocks" not in text, "a planner goes by those that there are"
    facts.check(dataclasses.replace(facts))


def test_what_computes_is_the_workers_own() -> None:
    with pytest.raises(
        ValueError, match=r"these parts would be in the other process: sampler; give them by make_parts"
    ):
        split_engine(FOLDER, CONFIG, parts=Parts(sampler=lambda logits, requests: None))  # type: ignore[arg-type,return-value]


@pytest.mark.usefixtures("forked_workers")
def test_parts_that_plan_are_used(expected) -> None:
    pool = BlockPool(CONFIG.num_blocks or 0)
    engine = split_engine(FOLDER, CONFIG, dtype="float64", parts=Parts(block_pool=pool))
    try:
        assert engine.block_pool is pool
        assert [r.tokens for r in serve(engine)] == [r.tokens for r in expected]
    finally:
        engine.close()


PROPOSES_THE_LAST = """
from reference_impl.assembly.parts import Parts

class Last:
    def opened(self, slot): ...
    def closed(self, slot): ...
    def propose(self, slots, lengths, tokens, k):
        return tokens[slots, lengths - 1].long()[:, None].expand(-1, k)

def parts():
    return Parts(proposer=Last())
"""


@pytest.mark.usefixtures("forked_workers")
def test_a_proposer_lives_in_the_workers_process(
    expected: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proposes_the_last.py").write_text(PROPOSES_THE_LAST)
    monkeypatch.syspath_prepend(tmp_path)
    make_parts = importlib.import_module("proposes_the_last").parts
    config = dataclasses.replace(CONFIG, num_drafts=3)
    engine = split_engine(FOLDER, config, dtype="float64", make_parts=make_parts)
    assert [r.tokens for r in serve(engine)] == [r.tokens for r in expected]
    assert any(row.num_drafts for step in engine.trace.steps() for row in step.rows)
    engine.close()
    with pytest.raises(
        ValueError, match=r"num_drafts=3 needs a proposer: Parts\(host_proposer=\.\.\.\), or make_parts"
    ):
        split_engine(FOLDER, config)
