"""`inferlab profile` on a CPU: what was recorded, against hand-computed work and on the engine's time axis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from typer.testing import CliRunner

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench.profiling import record as record_module
from reference_impl.bench.profiling.alignment import _BESIDE, Alignment, merged
from reference_impl.bench.profiling.explain import kind_of
from reference_impl.bench.profiling.labels import PREFIX, labelled
from reference_impl.bench.profiling.record import Profile, record
from reference_impl.bench.profiling.report import explained
from reference_impl.bench.profiling.work import step_work
from reference_impl.cli import app
from reference_impl.interfaces import Row
from reference_impl.observe.perfetto import ENGINE

BATCH, CONTEXT = 4, 32


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(course_model("target"), dtype="float32", num_blocks=64)


@pytest.fixture(scope="module")
def profile(llm: LLM) -> Profile:
    return record(llm.engine, "decode", BATCH, CONTEXT, steps=3)


def test_the_longest_entries_are_operators_and_together_shorter_than_the_step(llm: LLM, profile: Profile) -> None:
    found = explained(llm.engine, profile)
    assert len(found) == 5
    assert all(name.startswith(("aten::", "mkldnn::")) for name, _ in found)
    assert 0 < sum(e.seconds for _, e in found) <= profile.recorded.busy < profile.step_seconds
    products = [e for _, e in found if "product" in e.what]
    assert products
    assert all(e.calls == 8 and e.flops and e.bytes and e.share for e in products)


def test_work_is_what_one_computes_by_hand(llm: LLM) -> None:
    """The course model: 8 layers, hidden 256, 4 heads over 2 KV heads of 64, vocabulary 4096, float32."""
    c = llm.engine.model.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (8, 256, 4, 2, 64)
    rows = [Row("a", 10, 1, True), Row("b", 99, 1, True)]
    work = step_work(llm.engine.model, [rows], 4)
    assert work["qkv"].flops == 8 * 2 * 2 * 256 * 512
    assert work["qkv"].bytes == 8 * 4 * (256 * 512 + 2 * 256 + 2 * 512)
    assert work["qkv"].calls == 8
    assert work["lm_head"].flops == 2 * 2 * 256 * c.vocab_size
    assert work["attention"].flops == 8 * 4 * 256 * (11 + 100)
    # Keys and values of all positions read, of one written; queries in and results out.
    assert work["attention"].bytes == 8 * 4 * (2 * 128 * (11 + 1 + 100 + 1) + 2 * 2 * 256)


def test_a_chunk_of_a_prompt_sees_what_was_there_and_itself(llm: LLM) -> None:
    work = step_work(llm.engine.model, [[Row("a", 5, 3, False)]], 4)
    assert work["attention"].flops == 8 * 4 * 256 * (6 + 7 + 8)
    assert work["attention"].bytes == 8 * 4 * (2 * 128 * (8 + 3) + 2 * 256 * 3)
    assert work["lm_head"].flops == 0


def test_the_mean_of_steps_is_taken(llm: LLM) -> None:
    one, two = [Row("a", 0, 1, True)], [Row("a", 0, 1, True), Row("b", 0, 1, True)]
    work = step_work(llm.engine.model, [one, two], 4)
    assert work["o"].flops == 8 * 2 * 1.5 * 256 * 256


def test_what_was_computed_agrees_with_the_recorded_shapes(llm: LLM, profile: Profile) -> None:
    """The gate and up product's rows and width, as the profiler saw them."""
    [entry] = [e for e in profile.recorded.entries() if e.label == "gate_up" and kind_of(e) == "product"]
    assert len(entry.calls) == 8
    assert {call.dims[0] for call in entry.calls} == {(BATCH, 256)}


def test_the_file_has_the_ops_of_each_step_inside_the_engines_step(llm: LLM, profile: Profile) -> None:
    content = json.loads(json.dumps(merged(llm.engine.trace, profile.file, profile.alignment), allow_nan=False))
    events = content["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == ENGINE + _BESIDE]
    models = [e for e in events if e["name"] == PREFIX + "model"]
    assert len(models) == 3
    slack = profile.alignment.error * 1e6 + 0.1
    for part, span in zip(models, spans[-3:], strict=True):
        assert span["args"]["rows"] == BATCH
        assert span["ts"] - slack <= part["ts"]
        assert part["ts"] + part["dur"] <= span["ts"] + span["dur"] + slack
        inside = [e for e in events if e.get("cat") == "cpu_op" and part["ts"] <= e["ts"] <= part["ts"] + part["dur"]]
        assert sum(e["name"].endswith(("_linear_pointwise", "::mm", "::addmm")) for e in inside) >= 8 * 4
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"engine", "requests"} < names
    assert profile.alignment.error < 1e-2, "wider than a step: the two would not be told apart"


def test_labels_are_gone_afterwards(llm: LLM) -> None:
    engine = llm.engine
    parts: list[Any] = [engine.attention, engine.executor, engine.scheduler, engine.model, *engine.model.linears()]
    before = [dict(vars(part)) for part in parts]
    with labelled(engine):
        assert [vars(part).keys() for part in parts] != [b.keys() for b in before]
    assert [dict(vars(part)) for part in parts] == before


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_prefill_is_profiled_with_new_prompts_in_each_step(overlap: Literal["on", "off"]) -> None:
    llm = LLM(course_model("target"), num_blocks=64, overlap=overlap)
    found = record(llm.engine, "prefill", 2, 24, steps=2)
    assert [[row.num_tokens for row in rows] for rows in found.rows] == [[24, 24]]
    assert not llm.engine.requests


@pytest.mark.parametrize(
    ("seconds", "multiplies", "rate"),
    [({"float32": 2.0, "bfloat16": 8.0}, "float32", 2.0), ({"bfloat16": 1.0, "float32": 2.0}, "bfloat16", 1.0)],
)
def test_the_limit_of_arithmetic_is_the_faster_dtype_that_a_cpu_can_compute_in(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], multiplies: str, rate: float
) -> None:
    def timed(run: Any, device: torch.device) -> float:
        return seconds[str(run.args[0].dtype).removeprefix("torch.")] if hasattr(run, "args") else 0.5

    monkeypatch.setattr(record_module, "_seconds", timed)
    found = record_module.measure(torch.device("cpu"), torch.bfloat16)
    assert (found.multiplies, found.rate) == (multiplies, 2 * 512**3 / rate)
    assert found.bandwidth == 2 * (64 << 20) / 0.5


def test_the_offset_is_what_all_steps_allow() -> None:
    steps = [(10.0, 11.0), (12.0, 13.0)]
    found = Alignment.of(steps, [(109.0, 111.5), (111.8, 113.2)])
    assert found.offset == pytest.approx(100.0)
    assert found.error == pytest.approx(0.2)


def test_clocks_that_drift_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drift apart: by 0\.5"):
        Alignment.of([(10.0, 11.0), (12.0, 13.0)], [(110.0, 111.0), (112.5, 113.5)])


@pytest.mark.parametrize("more", [["--phase", "decode"], ["--phase", "prefill", "--overlap", "on"]])
def test_the_command_says_where_the_time_goes_and_writes_the_file(tmp_path: Path, more: list[str]) -> None:
    file = tmp_path / "step.json"
    some = ["--batch", "2", "--context", "40", "--steps", "2", "--trace", str(file)]
    done = CliRunner().invoke(app, ["profile", *some, *more])
    assert done.exit_code == 0, done.output
    for text in (f"One step: 2 requests {more[1]}", "in operators", "This machine, measured just now", "These 5 are"):
        assert text in done.output
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--phase", "both"], 2, "--phase: expected decode or prefill, got 'both'"),
        (["--attention", "none"], 2, "expected one of auto, triton, torch, compiled, got 'none'"),
        (["--quantization", "int3"], 2, "expected one of none, fp8, int8, int4, got 'int3'"),
        (["--shape", "llama-9"], 2, "expected one of llama-3-8b"),
        (["--context", "20000"], 1, "is above the model's 2048 positions"),
        (["nowhere"], 1, "no such file"),
        (["draft", "--shape", "llama-3-8b"], 2, "expected a model or --shape, got both 'draft' and --shape llama-3-8b"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(arguments: list[str], status: int, message: str) -> None:
    done = CliRunner().invoke(app, ["profile", *arguments])
    assert done.exit_code == status
    assert message in " ".join(done.output.split())
