"""Ranks in processes: the texts of one process; what is said of a rank that is lost, stopped or cannot start; nothing
is left behind."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.features.parallel.shared_memory import Board
from reference_impl.features.process.nursery import Nursery
from reference_impl.features.process.worker import WorkerError
from reference_impl.interfaces import SamplingParams, StepRow
from tests.executor.forked import forked_workers, kill  # noqa: F401
from tests.warm import Warm

FOLDER = course_model("draft")
CONFIG = EngineConfig(num_blocks=40, block_size=8, tensor_parallel_size=2)
ASKED = [
    ([5, 17, 40, 9] * 5, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)),
    ([8, 3, 61], SamplingParams(max_tokens=14, seed=4, temperature=1.2, top_p=0.9, ignore_eos=True)),
]


def serve(engine: Engine) -> list[list[int]]:
    requests = [engine.add(prompt, sampling, f"r{i}") for i, (prompt, sampling) in enumerate(ASKED)]
    while engine.has_work():
        engine.step()
    return [request.tokens for request in requests]


@pytest.fixture
def ranked() -> Iterator[Callable[..., Engine]]:
    """ranked(**options): an engine with two ranks in processes, which have ended behind the test."""
    engines: list[Engine] = []

    def make(config: EngineConfig = CONFIG, folder: Path = FOLDER, **options: Any) -> Engine:
        engines.append(ranked_engine(folder, config, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert all(rank._process.poll() is not None for rank in engine.executor.ranks), "no process is left behind"


@pytest.fixture
def forked_ranked(warm: Warm, forked_workers: None, ranked: Callable[..., Engine]) -> Callable[..., Engine]:  # noqa: F811
    return ranked


SCRIPT = """
from reference_impl import LLM, SamplingParams, course_model
llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=40, tensor_parallel_size=2)
sampling = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
print(llm.generate([[5, 17, 40, 9] * 5], sampling)[0].outputs[0].token_ids)
print([rank.pid for rank in llm.engine.executor.ranks])
"""


def test_ranks_are_forked_from_a_process_that_has_imported_torch_and_done_nothing(ranked) -> None:
    engine = ranked()
    nursery = engine.executor._nursery
    assert nursery is not None
    parents = [
        Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[1] for rank in engine.executor.ranks
    ]
    assert parents == [str(nursery.pid)] * 2
    assert len(os.listdir(f"/proc/{nursery.pid}/task")) == 1, "threads"
    assert "libtorch_cpu" in Path(f"/proc/{nursery.pid}/maps").read_text()
    engine.close()
    assert nursery._process.poll() in (0, -signal.SIGKILL), "it ends by itself, or by what watches over it"
    with pytest.raises(ChildProcessError, match=rf"the process {nursery.pid} that forks ranks has ended"):
        nursery.start("any")


ENDS = """
import os, signal, sys

def main():
    if sys.argv[2] == "signal":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[2] == "wait":
        signal.pause()
    sys.exit(int(sys.argv[2]))
"""


def test_how_a_forked_process_ended_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.syspath_prepend(tmp_path)
    nursery = Nursery()
    ended = [nursery.start("ends", how) for how in ("0", "7", "signal", "error", "wait")]
    *others, (waits, _) = ended
    assert [process.wait() for process, _ in others] == [0, 7, -signal.SIGTERM, 1]
    assert [process.poll() for process, _ in others] == [0, 7, -signal.SIGTERM, 1]
    assert waits.poll() is None
    with pytest.raises(TimeoutError, match=f"process {waits.pid} still runs after 0.01 s"):
        waits.wait(0.01)
    monkeypatch.setattr("reference_impl.features.process.nursery._TELLING_SECONDS", 1.0)
    monkeypatch.setattr("reference_impl.features.process.nursery._CLOSING_SECONDS", 1.0)
    os.kill(nursery.pid, signal.SIGSTOP)
    waits.kill()
    assert waits.wait() == -signal.SIGKILL, "its parent cannot say so"
    for _, own in ended:
        own.close()
    nursery.close()
    assert nursery._process.poll() == -signal.SIGKILL


def test_a_process_whose_parent_is_gone_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.syspath_prepend(tmp_path)
    nursery = Nursery()
    waits, own = nursery.start("ends", "wait")
    os.kill(nursery.pid, signal.SIGKILL)
    assert waits.wait() == -signal.SIGKILL
    own.close()
    nursery.close()


def test_a_plain_script_writes_the_text_of_one_process_and_leaves_nothing(tmp_path: Path) -> None:
    """A script without a main guard, which never closes its engine; the processes are started as they are in use."""
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-P", script], capture_output=True, text=True, env=there, timeout=600)
    assert done.returncode == 0, done.stderr
    tokens, pids = (eval(line) for line in done.stdout.splitlines())
    alone = Engine(load_model(FOLDER, torch.float32), EngineConfig(num_blocks=40))
    assert tokens == serve(alone)[0][20:]
    assert not any(is_there(pid) for pid in pids)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_engines_at_once(forked_ranked) -> None:
    expected = serve(Engine(load_model(FOLDER, torch.float32), EngineConfig(num_blocks=40)))
    one, two = forked_ranked(), forked_ranked()
    assert serve(one) == serve(two) == expected


def test_ranks_make_drafts_under_a_grammar_at_the_same_time(forked_ranked) -> None:
    """The forward pass begins where the host asks for drafts, and drafts of the first layers are of all ranks, too."""

    class Odd:
        def allowed(self, output: Sequence[int]) -> bytes:
            return (b"\x55" if len(output) % 2 else b"\xaa") * 512

    drafts = {"speculative": "early-exit", "num_drafts": 2, "adaptive_drafts": "off"}
    config = EngineConfig(num_blocks=40)
    texts = []
    for engine in (
        Engine(load_model(FOLDER, torch.float32), config),
        forked_ranked(dataclasses.replace(CONFIG, step_seconds=20, **drafts)),
    ):
        request = engine.add(*ASKED[0], grammar=Odd())
        while engine.has_work():
            engine.step()
        texts.append(request.tokens)
    assert texts[0] == texts[1]


def test_a_rank_that_is_killed_ends_the_group_and_is_named(forked_ranked) -> None:
    engine = forked_ranked()
    engine.add(*ASKED[0])
    engine.step()
    kill(engine.executor.ranks[1])
    with pytest.raises(WorkerError, match=r"worker 1 \(process \d+\) was killed by signal 9") as caught:
        engine.step()
    assert caught.value.rank == 1
    assert "All 2 ranks were ended, and what their caches held is lost" in str(caught.value)
    assert all(rank._process.poll() is not None for rank in engine.executor.ranks)


def test_a_rank_that_is_stopped_is_named_with_what_the_others_wait_in(ranked) -> None:
    engine = ranked()  # no forks: what stands for one would be stopped in its place
    engine.add(*ASKED[0])
    engine.step()
    os.kill(engine.executor.ranks[1].pid, signal.SIGSTOP)
    engine.executor.seconds = 1
    late = r"rank 1 \(process \d+\) did not come to all_reduce of step \d+ within 1 s, for which all others wait"
    with pytest.raises(WorkerError, match=late) as caught:
        engine.step()
    assert caught.value.rank == 1
    assert all(rank._process.poll() is not None for rank in engine.executor.ranks)


def test_a_rank_that_does_not_answer_behind_the_last_meeting_is_named(forked_ranked) -> None:
    """All ranks came to the same meetings, so the board does not say who is missing; their answers do. What is said of
    a later step is what ended the ranks, and not how this process ended the others."""
    engine = forked_ranked()
    engine.add(*ASKED[0])
    engine.step()
    silent, _other = socket.socketpair()
    engine.executor.ranks[1].fileno = silent.fileno
    engine.executor.seconds = 1
    late = r"^rank 1 \(process \d+\) did not answer step \d+ within 1 s, and all others did. All 2 ranks were ended"
    with pytest.raises(WorkerError, match=late) as caught:
        engine.step()
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match=r"^step \d+ cannot be done, since the ranks have ended: rank 1 \(process"):
        engine.step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("submit", "MemoryError: of rank 1"),
        ("collect", "step 1: rank 1 has other tokens than rank 0"),
        ("close", "they were closed"),
    ],
)
def test_threads_that_have_ended_say_by_what(what: str, message: str) -> None:
    engine = ranked_engine(FOLDER, CONFIG, ranks="threads")
    engine.add(*ASKED[0])
    rank = engine.executor.executors[1]
    collect = rank.collect

    def submit(step: Any) -> Any:
        raise MemoryError("of rank 1")

    def other_tokens(ticket: Any) -> Any:
        return dataclasses.replace(collect(ticket), tokens=((1, 2, 3),))

    if what == "close":
        engine.executor.close()
    else:
        setattr(rank, what, {"submit": submit, "collect": other_tokens}[what])
        with pytest.raises((MemoryError, WorkerError), match=message.removeprefix("MemoryError: ")):
            engine.step()
    with pytest.raises(WorkerError, match=f"cannot be done, since the ranks have ended: {message}"):
        engine.step()
    engine.close()


def test_a_step_that_raises_in_a_rank_is_shown(forked_ranked) -> None:
    engine = forked_ranked()
    engine.add(*ASKED[0])
    engine.step()
    submit, row = engine.executor.ranks[1].submit, StepRow(slot=77, start=0, num_tokens=1, samples=True)
    engine.executor.ranks[1].submit = lambda step: submit(dataclasses.replace(step, rows=(row,)))
    with pytest.raises(WorkerError, match=r"(?s)worker 1 failed in step \d+:.*Traceback.*All 2 ranks were ended"):
        engine.step()


def test_what_is_missing_at_the_start_is_named(forked_ranked, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'model' / 'model.safetensors'}: no such file")):
        forked_ranked(folder=tmp_path / "model")
    with pytest.raises(ValueError, match="2 query heads and 1 KV heads can be divided .*got 3"):
        forked_ranked(EngineConfig(num_blocks=40, tensor_parallel_size=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "triton"}, "attention='triton': its products are joined"),
        ({"overlap": "on"}, "overlap='on': ranks do one step after the other"),
        ({"graphs": "on"}, "graphs='on': CUDA graphs of collectives are not captured"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    config = EngineConfig(num_blocks=40, tensor_parallel_size=2, **options)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 with {message}. Leave one of the two out"):
        ranked_engine(FOLDER, config)
    with pytest.raises(ValueError, match="device='cuda': there is no transport between GPUs"):
        ranked_engine(FOLDER, CONFIG, device="cuda")


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_where_cores_may_see_writes_in_another_order_ranks_meet_through_gloo(
    layout: dict[str, int], forked_ranked: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    engine = forked_ranked(EngineConfig(num_blocks=40, block_size=8, **layout))
    assert not engine.executor.board.headers.any(), "nothing but counts is on the board"
    assert not engine.executor.board.mail.any()
    assert serve(engine) == serve(Engine(load_model(FOLDER, torch.float32), EngineConfig(num_blocks=40)))
    first, _ = engine.executor.reports()
    assert first.num_bytes > 0
    engine.add(*ASKED[0])
    engine.step()
    kill(engine.executor.ranks[1])
    with pytest.raises(WorkerError, match="worker 1 .*was killed by signal 9"):
        serve(engine)


def test_a_board_is_a_file_where_the_system_has_no_memory_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    board = Board(2)
    other = Board(2, board.path)
    board.state[1, 0] = 7
    assert other.waited_for() == ([0], "nothing of step 0")
    board.close_path()
    board.close_path()
    assert not board.path.exists()
    assert other.progress() == 7
