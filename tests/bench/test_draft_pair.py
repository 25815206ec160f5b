"""The exercise with a target and a draft of one's own: what it says is in the trace, the text is plain decoding's."""

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.bench import draft_pair, speculative


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "NEW_TOKENS", 16)


def test_more_drafts_give_more_tokens_a_step_and_the_same_text(short: None) -> None:
    target, draft = course_model("target"), course_model("draft")
    one, four = draft_pair.measure(target, draft, (1, 4), rounds=1, dtype="float64", kv_cache_bytes=2**23)
    assert (one["k"], four["k"]) == (1, 4)
    assert 1 < one["tokens_per_row"] <= 2
    assert one["tokens_per_row"] < four["tokens_per_row"] <= 5
    assert one["guesses"] / one["steps"] <= 1 < four["guesses"] / four["steps"] <= 4
    assert one["same_texts"] == four["same_texts"] == 1
    for row in (one, four):
        assert row["speed_up"] > 0


def test_it_says_what_it_measured_on_the_course_models(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_pair.main(["--num-drafts", "2", "--dtype", "float64"]) == 0
    said = capsys.readouterr().out
    assert "k = 2:" in said
    assert "1 of 1 texts the same" in said
