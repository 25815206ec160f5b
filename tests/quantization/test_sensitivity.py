"""The choice of schemes under a budget, against all choices there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.models.quantization.sensitivity import Cost, allocate

COSTS = st.dictionaries(
    st.sampled_from("abcde"),
    st.dictionaries(
        st.sampled_from(("int4", "fp8", "int8")), st.builds(Cost, st.integers(1, 9), st.floats(0, 5)), min_size=1
    ),
    min_size=1,
)


@given(costs=COSTS, budget=st.integers(0, 45))
def test_no_other_choice_within_the_budget_does_less_harm(costs: dict[str, dict[str, Cost]], budget: int) -> None:
    choices = [dict(zip(costs, names, strict=True)) for names in itertools.product(*costs.values())]

    def bits(choice: dict[str, str]) -> int:
        return sum(costs[layer][scheme].bits for layer, scheme in choice.items())

    def harm(choice: dict[str, str]) -> float:
        return sum(costs[layer][scheme].harm for layer, scheme in choice.items())

    allowed = [choice for choice in choices if bits(choice) <= budget]
    if not allowed:
        with pytest.raises(ValueError, match="the smallest schemes take"):
            allocate(costs, budget)
        return
    found = allocate(costs, budget)
    assert bits(found) <= budget
    assert harm(found) == pytest.approx(min(map(harm, allowed)))


def test_a_layer_without_choices_is_an_error() -> None:
    with pytest.raises(ValueError, match="a: expected at least one scheme"):
        allocate({"a": {}}, 5)
