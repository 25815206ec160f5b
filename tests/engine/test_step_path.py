"""How much a reader meets in one decoding step of the whole engine, where no feature is in use."""

from __future__ import annotations

from pathlib import Path

import reference_impl
from reference_impl import LLM, SamplingParams, course_model
from tests.core.step_path import entered

MOST_FUNCTIONS, MOST_FILES = 60, 18


def test_a_decoding_step_with_all_features_enters_few_functions() -> None:
    llm = LLM(course_model("target"), dtype="float32", device="cpu", num_blocks=32)
    prompt, sampling = llm.encode("def fibonacci(n):"), SamplingParams(max_tokens=16, temperature=0.7, seed=1)
    llm.engine.add(prompt, sampling)
    for _ in range(3):
        llm.engine.step()
    found = entered(llm.engine.step, Path(reference_impl.__file__).parent)
    assert len(found) <= MOST_FUNCTIONS, found
    assert len({file for file, _ in found}) <= MOST_FILES
    rooms = ("assembly/engine.py", "core/engine.py", "core/planner.py", "observe/trace.py")
    own = [name for file, name in found if file in rooms]
    assert own == [
        "Engine.step", "Engine._submit", "Planner.step", "Engine._collect", "output_of", "Engine._record", "Trace.add",
    ]  # fmt: skip
