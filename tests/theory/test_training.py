"""What a rank keeps in training, against the figures of the ZeRO paper."""

import pytest

from reference_impl.theory.training import sent_bytes, state


def test_a_model_of_7_5_billion_on_64_ranks_takes_what_the_paper_says() -> None:
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    found = [state(7.5e9, 64, zero).total / 1e9 for zero in (0, 1, 2, 3)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_zero_3_sends_half_as_much_again_as_data_parallelism() -> None:
    assert sent_bytes(1e9, 64, 3) == 1.5 * sent_bytes(1e9, 64, 0)
    assert sent_bytes(1e9, 1, 0) == 0


@pytest.mark.parametrize(("ranks", "zero"), [(8, 4), (8, -1), (0, 1)])
def test_other_stages_and_no_ranks_are_refused(ranks: int, zero: int) -> None:
    with pytest.raises(ValueError, match="expected zero to be 0, 1, 2 or 3 and at least 1 rank"):
        state(1e9, ranks, zero)
