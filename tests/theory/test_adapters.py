"""The size of a LoRA adapter: rank times the two sides of each matrix it stands beside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory.adapters import lora_params
from reference_impl.theory.model_shapes import MODELS, model

DENSE = st.sampled_from(sorted(name for name, shape in MODELS.items() if shape.active_params is None))


def test_rank_16_on_all_matrices_of_an_8b_by_hand() -> None:
    q, k, v, o = 4096 + 4096, 4096 + 1024, 4096 + 1024, 4096 + 4096
    mlp = 3 * (4096 + 14_336)
    assert lora_params(model("llama-3-8b"), 16) == 32 * 16 * (q + k + v + o + mlp) == 41_943_040


@given(DENSE, st.integers(1, 256))
def test_an_adapter_grows_with_its_rank_and_adds_up_over_its_targets(name: str, rank: int) -> None:
    shape = model(name)
    assert lora_params(shape, rank) == rank * lora_params(shape, 1)
    assert lora_params(shape, rank) == sum(lora_params(shape, rank, [target]) for target in shape.layer_matrices)
    assert lora_params(shape, rank, []) == 0


def test_a_target_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected targets among \['q', .*\], got \['router'\]; correct the names"):
        lora_params(model("llama-3-8b"), 8, ["q", "router"])
    with pytest.raises(ValueError, match="got \\['gate'\\]"):
        lora_params(model("falcon-7b"), 8, ["gate"])  # no gate in this MLP
    with pytest.raises(ValueError, match="expected uniform dense layers"):
        lora_params(model("mixtral-8x7b"), 8)
