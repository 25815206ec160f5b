"""The benchmark of drafts: what it derives is in the trace, and a text that differs ends it."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import speculative as bench


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEW_TOKENS", 12)
    monkeypatch.setattr(bench, "BATCHES", (1,))
    monkeypatch.setattr(bench, "FIXED", (2,))
    monkeypatch.setattr(bench, "METHODS", {name: bench.METHODS[name] for name in ("ngram", "draft")})
    monkeypatch.setattr(bench, "SHAPED", {"lookahead": bench.SHAPED["lookahead"]})
    # In float32 rounding depends on how many rows a step has, and two tokens may be all but equally likely.
    monkeypatch.setitem(bench.COMMON, "dtype", "float64")


def test_every_method_is_measured_against_plain_decoding_and_the_formula(small: None) -> None:
    found = bench.run(1, model="draft")
    assert [(case["workload"], case["requests"]) for case in found["cases"]] == [("repeats", 1), ("code", 1)]
    for case in found["cases"]:
        assert list(case["variants"]) == ["ngram k=2", "ngram adaptive", "draft k=2", "draft adaptive", "lookahead"]
        for row in case["variants"].values():
            assert 1 <= row["tokens_per_row"] <= 3
            assert row["speedup"]["runs"] == row["while_all_decode"]["runs"] == 1
            assert row["bound"] == pytest.approx(
                row["tokens_per_row"] / (row["v"] + row["guesses"] / row["steps"] * row["c"])
            )
    repeats = found["cases"][0]["variants"]["ngram k=2"]
    assert repeats["guesses"] > 0
    text = "\n".join(bench.lines(found))
    assert "repeats, 1 requests, plain step" in text
    assert text.count("formula") == 10
    assert text.count("transformers, assisted by the draft") == 2
    assert all(row["texts"] == {"equal": 1, "of": 1, "largest_gap": 0.0} for row in case["variants"].values())


def test_the_formula_is_of_steps_in_which_all_requests_decode(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEW_TOKENS", 40)
    drafting = {"speculative": "ngram", "num_drafts": 4, "adaptive_drafts": "off"}  # which depends on no clock
    options: tuple[dict[str, Any], ...] = (drafting, {})
    ngram, plain = (bench._Measured(LLM(course_model("draft"), **bench.COMMON, **mine)) for mine in options)
    for _ in range(2):
        ngram.serve(bench.workload("repeats", 3))
        plain.serve(bench.workload("repeats", 3))
    steps = ngram.llm.engine.trace.steps()
    assert {len(step.rows) for step in steps} > {3}, "some ended before others"
    assert {len(step.rows) for step in ngram.decoding} == {3}
    for one in (ngram, plain):
        at = [n for n, step in enumerate(one.decoding) if n and step.step_id > one.decoding[n - 1].step_id + 1]
        for pace, mine in zip(one.paces, (one.decoding[: at[0]], one.decoding[at[0] :]), strict=True):
            num = sum(sum(step.num_new_tokens) for step in mine[1:])
            assert pace == pytest.approx((mine[-1].finished_at - mine[0].finished_at) / num)
    ngram._calls = [(ended, 1.0) for ended, _ in ngram._calls]  # so that they are counted
    # A request with one token to go is not asked.
    assert 0 < ngram.proposing <= sum(len(step.rows) for step in ngram.decoding)
    assert ngram.proposing < len(ngram._calls), "some are of other steps"
    against, decoding = ngram.against(plain), ngram.decoding
    assert against["steps"] == len(decoding) < len(steps)
    assert against["tokens_per_row"] == sum(sum(step.num_new_tokens) for step in decoding) / (3 * len(decoding)) > 1


def test_one_run_measures_every_method_there_is() -> None:
    options = [*bench.METHODS.values(), *bench.SHAPED.values()]
    shown = [mine.get("draft_model", mine.get("speculative")) for mine in options]
    assert {*shown, "off"} == {*get_args(get_type_hints(EngineConfig)["speculative"])}
    assert [mine["draft_tree"] for mine in options if "draft_tree" in mine] == [
        (4, 2, 2), "dynamic",
    ]  # fmt: skip


def test_another_text_is_an_error_and_no_speed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = bench._Measured.serve

    def wrong(self: Any, prompts: list[str]) -> None:
        serve(self, prompts)
        if self.llm.engine.config.speculative == "draft":
            self.texts[0][-1] += 1

    monkeypatch.setattr(bench._Measured, "serve", wrong)
    with pytest.raises(RuntimeError, match="with drafts the text is another one: token 11 is"):
        bench.run(1, model="draft")
