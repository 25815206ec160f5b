"""What `inferlab eval --tasks` asks, how answers are judged, and its statistics against their definitions."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
from scipy.stats import binomtest
from typer.testing import CliRunner

from reference_impl import LLM, course_model
from reference_impl.bench import abilities
from reference_impl.bench.abilities import answers, heads_of, is_json_object, paired, questions, share
from reference_impl.bench.harness import TEXTS
from reference_impl.bench.quality import check_tokenizers
from reference_impl.cli import app


@pytest.mark.parametrize(("won", "lost", "both"), [(0, 0, 4), (3, 3, 1), (0, 6, 2), (9, 1, 0), (2, 5, 7)])
def test_the_test_of_pairs_is_the_binomial_one(won: int, lost: int, both: int) -> None:
    ours = [True] * won + [False] * lost + [True] * both
    theirs = [False] * won + [True] * lost + [True] * both
    found = paired(ours, theirs)
    assert (found["only_ours"], found["only_theirs"]) == (won, lost)
    assert found["p"] == pytest.approx(binomtest(won, won + lost).pvalue if won + lost else 1.0)
    assert found["difference"].value == pytest.approx((won - lost) / (won + lost + both))


@pytest.mark.parametrize("num", [2, 5, 40])
def test_a_share_of_all_has_an_interval_with_width(num: int) -> None:
    """The least rate of success at which all are right in 2.5 % of draws."""
    found = share([True] * num)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low**num == pytest.approx(0.025)
    none = share([False] * num)
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(1 - found.low))


def test_answers_are_judged_by_what_was_asked() -> None:
    assert is_json_object('{"a": 1}')
    assert not any(map(is_json_object, ("[1]", '{"a": 1', "", "nothing")))
    text = "x = 1\ndef short(a):\n    return a\n"
    text += "def long(a):\n    b = a\n    return b\nclass C:\n    def f(self):\n        pass\n"
    assert heads_of(text) == ["def long(a):\n    b = a\n"]
    assert heads_of("this is (not Python") == []
    parses = partial(abilities.parses, "def long(a):\n    b = a\n")
    assert parses("    return b\n")
    assert parses("    return b\nprint(")  # what follows the function is not looked at
    assert not parses("    return (b\n")
    assert not parses("return b")
    assert not parses("\n\n")


def test_the_course_model_finds_what_its_card_says_and_a_model_that_guesses_does_not() -> None:
    llm = LLM(course_model("target"), dtype="float32", num_blocks=512)
    asked = [
        q for q in questions(llm, (TEXTS / "judged.txt").read_text(), 2) if "512" not in q.kind and "256" not in q.kind
    ]
    kinds = {question.kind for question in asked}
    assert kinds == {
        "retrieval, 16 tokens back", "retrieval, 64 tokens back", "valid JSON", "the call that was asked for",
        "code that parses",
    }  # fmt: skip
    right = answers(llm, asked)
    sure = [one for one, question in zip(right, asked, strict=True) if "code" not in question.kind]
    assert sum(sure) >= len(sure) - 1
    again = questions(llm, (TEXTS / "judged.txt").read_text(), 2)
    assert [q.prompt for q in again][:4] == [q.prompt for q in asked][:4]  # the same every time


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    source, other = course_model("draft"), tmp_path / "other"
    shutil.copytree(source, other)
    check_tokenizers(source, other)
    raw = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(raw | {"truncation": {"max_length": 5}}))
    check_tokenizers(source, other)  # says nothing of which token is which
    vocab = raw["model"]["vocab"]
    one, two = list(vocab)[1000:1002]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    text = str(TEXTS / "judged.txt")
    done = CliRunner().invoke(app, ["eval", str(other), "--against", "draft", "--text", text])
    assert done.exit_code == 1
    assert "same tokenizer, got one with another model: KL" in done.output.replace("\n", " ")
    (other / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer.json, found none"):
        check_tokenizers(source, other)


def test_what_is_beyond_chance_is_said() -> None:
    row = {"questions": 20, "ours": share([True] * 5 + [False] * 15), "theirs": share([True] * 20)}
    [line] = abilities.lines({"valid JSON": row | paired([True] * 5 + [False] * 15, [True] * 20)})
    assert line.startswith("valid JSON, 20                   0.25 (")
    assert line.endswith("the other 1.00 (0.83 to 1.00), 15 lost and 0 won, p = 0.000, beyond chance")


def test_the_command_says_the_same_to_people_and_to_programs() -> None:
    options = ["--text", str(TEXTS / "judged.txt"), "--length", "64", "--windows", "2", "--tasks", "2"]
    run = CliRunner().invoke
    done = run(app, ["eval", "draft", "--against", "draft", *options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["windows"] == 2
    assert found["measures"]["agreement"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["measures"]["kl"]["value"] == pytest.approx(0, abs=1e-6)
    for row in found["tasks"].values():
        assert (row["p"], row["only_ours"], row["only_theirs"]) == (1.0, 0, 0)
        assert row["ours"] == row["theirs"]
    options[options.index("--tasks") + 1] = "0"
    said = run(app, ["eval", "draft", *options]).output
    assert f"perplexity        {math.exp(found['measures']['nats']['value']):.3f} (" in said
    assert "valid JSON" not in said
    assert run(app, ["eval", "draft", *options[:-1], "1"]).exit_code == 2
