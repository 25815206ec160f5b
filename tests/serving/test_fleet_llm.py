"""Engines in processes of their own, for a script: the texts of one engine, and nothing is left when it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.serving.fleet_llm import FleetLLM

PROMPTS = [f"# file {i}\n" + f"def f{i}(x):\n    return x\n\n" * 8 for i in range(2)]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_two_roles_write_the_texts_of_one_engine(warm_engines: None) -> None:
    """Two processes of engines."""
    alone = LLM(course_model("draft"), dtype="float64", num_blocks=200)
    with FleetLLM(course_model("draft"), prefill=1, decode=1, dtype="float64", num_blocks=200) as fleet:
        found = fleet.generate(PROMPTS, GREEDY)
        assert [out.text for out in found] == [out.text for out in alone.generate(PROMPTS, GREEDY)]
        assert [out.prompt_token_ids for out in found] == [alone.encode(prompt) for prompt in PROMPTS]
        assert len({out.request_id for out in found}) == len(found)
        assert fleet.status()["engines"][1]["hit_rate"] > 0.5, "what it has not computed itself has come"
        several = SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=2)
        [samples] = fleet.generate(PROMPTS[0], several)
        [expected] = alone.generate(PROMPTS[0], several)
        assert [out.text for out in samples] == [out.text for out in expected.outputs]
        assert "".join(fleet.stream(PROMPTS[1], GREEDY)) == found[1].text
        left = fleet.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
        next(left)
        left.close()
        with pytest.raises(ValueError, match="the prompt has 5000 tokens"):
            fleet.generate([[1] * 5000])
        status = fleet.status()
        assert status["roles"] == ["prefill", "decode"]
        pids = [engine["pid"] for engine in status["engines"]]
    fleet.close()  # again
    assert not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]
