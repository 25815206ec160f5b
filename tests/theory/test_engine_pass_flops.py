"""What an engine computes in one pass: logits of one token per sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency
from reference_impl.theory.model_shapes import MODELS, model

NAMES = st.sampled_from(sorted(MODELS))


@given(NAMES, st.integers(1, 10**5), st.integers(0, 10**5))
def test_all_tokens_but_the_last_lack_exactly_the_output_matrix(name: str, new: int, past: int) -> None:
    shape = model(name)
    skipped = latency.pass_flops(shape, new, past) - latency.engine_pass_flops(shape, new, past)
    assert skipped == 2 * shape.vocab_size * shape.hidden_size * (new - 1)


@given(NAMES, st.integers(0, 10**5))
def test_a_decode_step_has_no_logits_to_spare(name: str, past: int) -> None:
    shape = model(name)
    assert latency.engine_pass_flops(shape, 1, past) == latency.decode_flops(shape, past + 1)


@given(NAMES, st.integers(1, 5000), st.integers(1, 5000))
def test_a_chunk_more_costs_one_more_row_of_logits_and_nothing_else(name: str, first: int, second: int) -> None:
    shape = model(name)
    chunks = latency.engine_pass_flops(shape, first) + latency.engine_pass_flops(shape, second, first)
    whole = latency.engine_pass_flops(shape, first + second)
    cached, new = (latency.flops_per_pair(shape)[i] for i in (1, 0))
    absorbed = (cached - new) * first * second  # latent attention meets cached tokens in another form
    assert chunks == whole + 2 * shape.vocab_size * shape.hidden_size + absorbed


def test_arrays_are_counted_like_numbers() -> None:
    shape = model("llama-3-8b")
    found = latency.engine_pass_flops(shape, np.array([1, 64, 100_000]), np.array([7, 0, 100_000]))
    assert found.tolist() == [latency.engine_pass_flops(shape, q, p) for q, p in ((1, 7), (64, 0), (100_000, 100_000))]
