"""The bench of prompts in one engine and answers in another: its parts here, in one process; the whole of it, which
starts processes, in `make test-all`."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference_impl import course_model
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.bench import disaggregation, page_path
from reference_impl.bench.slow_link import SlowTransport
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.interfaces import PageTransfer, Transfers

SMALL = page_path.Shape(num_layers=2, num_kv_heads=2, head_dim=16, num_pages=12, chunk=5)


def test_pages_cross_as_they_were() -> None:
    with page_path.path(SMALL) as path:
        for _ in range(2):
            path.cross(*path.reserve())
        assert path.is_right
        path.receiver.cache.data[0, 0, path._blocks[3]] += 1
        assert not path.is_right


def test_what_does_not_fit_is_an_error_and_no_figure() -> None:
    with page_path.path(SMALL) as path:
        _, here = path.reserve()
        pages, _ = path.reserve()  # the slots are still the other one's
        assert not here.is_set()
        with pytest.raises(RuntimeError, match="pages were not moved: KeyError"):
            path.receiver.move(Transfers(loads=(PageTransfer(0, tuple(pages)),)))


def test_the_path_is_measured_beside_a_copy() -> None:
    result = page_path.page_path(2, SMALL)
    assert result["bytes"] == 12 * result["page_bytes"] == 12 * 2 * 2 * 16 * 2 * 16 * 2
    assert {by: row["runs"] for by, row in result["of_a_copy"].items()} == {"clock": 2, "processor": 2}
    assert all(0 < row["min"] <= row["max"] for row in result["of_a_copy"].values())


def test_without_nixl_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(owner: str) -> None:
        raise ImportError("NIXL is not installed: pip install 'inferlab[transfer]'")

    monkeypatch.setattr(page_path, "NixlTransport", missing)
    assert page_path.nixl(1, [1 << 20], 1 << 16) == {
        "not_measured": "NIXL is not installed: pip install 'inferlab[transfer]'"
    }


def test_a_slow_link_takes_the_time_that_its_bytes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, now = list[float](), [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("reference_impl.bench.slow_link.time", clock)
    receiver, slow = SharedMemoryTransport("decode"), SlowTransport(SharedMemoryTransport("prefill"), 1000.0)
    memory, where = receiver.share("prefill", 2, 500)
    link = slow.connect(where)
    page = np.full(500, 7, np.uint8).data
    futures: list[Future[None]] = [link.write([(page, 0), (page, 1)], time.monotonic() + 60) for _ in range(2)]
    for future in futures:
        future.result(60)
    assert slept == pytest.approx([1.0, 1.0])
    assert bytes(memory.slot(1)) == bytes([7] * 500)
    slow.close()
    receiver.close()


def test_gaps_count_tokens() -> None:
    stream = [(1.0, 1), (1.5, 1), (2.5, 2)]
    assert disaggregation.gaps([stream, [(3.0, 1)]]) == [0.5, 0.5, 0.5]


def test_the_steps_of_a_prompt_and_of_decoding_are_told_apart() -> None:
    engine = Engine(load_model(course_model("draft")), EngineConfig(num_blocks=20, max_num_batched_tokens=16))
    seconds = disaggregation.steps_of(engine, disaggregation.prompt_of(3, 40))
    lengths = [[row.length for row in step.rows] for step in engine.trace.steps()]
    assert lengths == [[16], [16], [8], *[[1]] * 7]
    assert len(seconds) == 2


def test_prompts_differ_from_the_first_page_on() -> None:
    pages = {tuple(disaggregation.prompt_of(turn, 40)[:16]) for turn in range(200)}
    assert len(pages) == 200


BOTH = {"clock": {"median": 0.3, "min": 0.2, "max": 0.4}, "processor": {"median": 0.27, "min": 0.25, "max": 0.28}}
RESULT: dict[str, Any] = {
    "page_path": {"bytes": 33_554_432, "of_a_copy": BOTH},
    "nixl": {"of_bare": {"8388608": BOTH}},
    "course": {"tokens": 1000, "bytes": 4_000_000, "link_bytes_per_s": 4e9,
               "seconds": {"prefill": 0.2, "decode": 0.005, "first": 0.22},
               "of_its_parts": {"median": 1.07, "min": 1.05, "max": 1.1}},
    "random": {"tokens": 2048, "bytes": 33_000_000, "link_bytes_per_s": 4e9, "slow_bytes_per_s": 33e6,
               "seconds": {"prefill": 2.0, "decode": 0.01, "first": 2.2},
               "hidden": {"median": 0.8, "min": 0.75, "max": 0.9},
               "of_its_parts": {"median": 1.09, "min": 1.05, "max": 1.1}},
    "burst": {"one_p99_s": {"median": 0.1}, "two_p99_s": {"median": 0.05},
              "times_shorter": {"median": 2.0, "min": 1.9, "max": 2.1}},
}  # fmt: skip


def test_its_lines_have_each_figure_beside_its_goal_and_name_what_is_missing() -> None:
    path, nixl, course, random, hidden, burst = disaggregation.lines(RESULT)
    assert "0.30x (0.20-0.40), by processor time 0.27x (0.25-0.28) (goal 0.25)" in path
    assert "our NIXL, 8 MiB, of bare NIXL's speed: 0.30x (0.20-0.40), by processor time 0.27x" in nixl
    without = disaggregation.lines(RESULT | {"nixl": {"not_measured": "NIXL is not installed"}})
    assert without[1] == "NIXL: not measured: NIXL is not installed"
    assert "1.07x (1.05-1.10) of its parts (goal 1.15): prefill 200 ms, link 1.0, a step 5.0" in course
    assert "2,048 tokens, 33.0 MB" in random
    assert "33.0 MB/s, half the prefill's time: 80% of it hidden (75% to 90%; goal 70%)" in hidden
    assert "one engine 100 ms, two 50 ms, 2.00x (1.90-2.10) shorter" in burst


def test_small_sizes_are_not_saved(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        disaggregation.main(["--quick", "--save"])
    assert "--quick says nothing about speed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_bench() -> None:
    result = disaggregation.run(1, disaggregation.QUICK)
    assert result["random"]["hidden"]["runs"] == result["course"]["of_its_parts"]["runs"] == 1
    assert len(disaggregation.lines(result)) == 6
