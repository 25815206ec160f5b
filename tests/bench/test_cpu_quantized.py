"""The benchmark of quantized weights measures what it says, on a small model: and it would notice a wrong answer."""

from __future__ import annotations

import pytest
import torch

from reference_impl.assembly.llm import LLM
from reference_impl.bench import cpu_quantized

SMALL = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict:
    return cpu_quantized.run(rounds=1, new_tokens=6, **SMALL)


def test_every_candidate_is_timed_and_verified(result) -> None:
    assert set(result["milliseconds_per_token"]) == {"dynamic", "static", "bfloat16", "int8", "int4"}
    assert set(result["verified"]) == {"dynamic", "static", "int8", "int4"}
    assert set(result["faster_than_transformers_bfloat16"]) == {"bfloat16", "int8", "int4"}
    assert set(result["faster_than_our_bfloat16"]) == {"int8", "int4"}


def test_the_bytes_of_a_step_are_those_of_the_weights(result) -> None:
    linear = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    lm_head = 4096 * 64
    size = {name: megabytes * 1e6 for name, megabytes in result["weight_megabytes_per_step"].items()}
    assert result["parameters"] == linear + lm_head + 5 * 64
    assert size["bfloat16"] == pytest.approx(2 * (linear + lm_head))
    assert linear + 2 * lm_head < size["int8"] < 1.1 * linear + 2 * lm_head
    assert (linear + lm_head) / 2 < size["int4"] < 0.66 * (linear + lm_head)


def test_the_tables_say_it(result) -> None:
    text = cpu_quantized.markdown(result)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| bfloat16", "| int8", "| int4"]


def test_a_wrong_token_stops_it(tmp_path) -> None:
    cpu_quantized.make_model(tmp_path, **SMALL)
    model = LLM(tmp_path, dtype="bfloat16", device="cpu", quantization="int4").engine.model
    random = torch.randint(4096, (5,), generator=torch.Generator().manual_seed(0)).tolist()
    with pytest.raises(RuntimeError, match="behind the first choice: not a near-tie"):
        cpu_quantized.check_choices(tmp_path, model, random)
