"""Tokens that a prefix cache saves, the prefill that is left, and prices: against counting one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import latency, prefix_cache
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

counts = st.integers(1, 60)


@given(counts, counts, st.integers(1, 32))
def test_what_is_cached_is_whole_blocks_of_the_shared_part_and_never_the_last_token(shared, prompt, block_size) -> None:
    found = prefix_cache.cached_tokens(shared, prompt, block_size)
    assert found == max(n for n in range(0, prompt, block_size) if n <= shared)
    assert prompt - found >= 1
    assert prefix_cache.cached_tokens(shared, prompt, 1) - found < block_size


@given(counts, counts, counts, st.integers(1, 12))
def test_a_conversation_sends_its_history_again_with_every_turn(system, message, answer, turns) -> None:
    history, sent, cached, computed = system, 0, 0, 0
    for _ in range(turns):
        history += message
        sent += history
        computed += history - cached
        cached = history + answer - 1  # the last sampled token is never fed back
        history += answer
    assert prefix_cache.conversation_tokens(system, message, answer, turns) == sent
    assert prefix_cache.conversation_floor(system, message, answer, turns) == computed


@given(st.integers(2, 20_000), st.data())
def test_with_more_cached_a_prefill_never_takes_longer_and_with_nothing_cached_it_is_a_plain_one(prompt, data) -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    some = data.draw(st.integers(0, prompt - 1))
    more = data.draw(st.integers(some, prompt - 1))
    seconds = [float(prefix_cache.prefill_seconds(shape, prompt, n, h100)) for n in (0, some, more)]
    assert seconds[0] == pytest.approx(float(latency.prefill_seconds(shape, prompt, h100)))
    assert seconds[0] * (1 + 1e-9) >= seconds[1] >= seconds[2] * (1 - 1e-9)


@given(st.floats(1.0, 3.0), st.floats(0.0, 0.9))
def test_at_break_even_writing_and_reading_costs_what_sending_plainly_does(write, read) -> None:
    reads = prefix_cache.reads_to_break_even(write, read)
    plain = prefix_cache.input_price(1 + reads, 0, 0, write, read)
    assert prefix_cache.input_price(0, 1, reads, write, read) == pytest.approx(plain)
