"""The widgets of chapters 12a and 12b: every control at both ends; bytes, shares and sums as the engine has them."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from chapters.widgets import layout_explorer, ring_stepper
from chapters.widgets.layout_explorer import COURSE, MODELS, SIZES, draw, layout
from chapters.widgets.ring_stepper import summands
from reference_impl.assembly.config import course_model
from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.parallel.all_reduce import ring
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.threads import ThreadGroup


def ends(control: Any) -> tuple[Any, Any]:
    if hasattr(control, "options"):
        return control.options[0], control.options[-1]
    return control.min, control.max


@pytest.mark.parametrize("make", [layout_explorer, ring_stepper])
@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends(make: Any) -> None:
    view = make()
    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
            assert "nan" not in view.shown.alt


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_engine(size: int) -> None:
    """What each rank of the course model holds, and shows the others for one token, counted while it computes."""
    group = ThreadGroup(size)
    ranks = [group.rank(rank) for rank in range(size)]
    models = [load_model(course_model(), torch.float32, rank=RankModel(rank)) for rank in ranks]
    windows = models[0].config.layer_windows

    def one_token(model: Decoder) -> None:
        model(ragged_batch([([5], 0)], 1, model.device, windows), None, RecomputeAttention(0.125, None))

    with ThreadPoolExecutor(size) as pool, torch.inference_mode():
        list(pool.map(one_token, models))
    for rank, model in zip(ranks, models, strict=True):
        found = layout(COURSE, size, rank.rank, 1, 4)
        assert found.sums + found.logits == rank.num_bytes
        assert found.num_sums + 1 == rank.num_calls
        matrices = sum(linear.weight_bytes() for linear in model.linears()) + model.embedding.nbytes
        assert found.weight_bytes == matrices
        assert (found.queries.length, found.keys.length) == (model.config.num_heads, model.config.num_kv_heads)


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_all_ranks_are_the_whole_and_repeated_kv_heads_besides(name: str) -> None:
    shape, width = MODELS[name]
    whole = layout(shape, 1, 0, 1, width)
    assert (whole.sums, whole.logits) == (0, 0)
    for size in (size for size in SIZES if shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0):
        if size > shape.num_heads:
            continue
        parts = [layout(shape, size, rank, 1, width) for rank in range(size)]
        repeated = sum(part.keys.length for part in parts) - shape.num_kv_heads
        more = 2 * repeated * shape.layers * shape.head_dim * shape.hidden_size * width
        assert sum(part.weight_bytes for part in parts) == whole.weight_bytes + more
        assert repeated == shape.num_kv_heads * (parts[0].copies - 1)
        assert sum(part.queries.length for part in parts) == shape.num_heads


def test_it_says_what_a_rank_has() -> None:
    said = draw("llama-3-70b, 16 bits", 16, 3, 1).alt
    assert "KV heads 1 of 8 (each kept by 2 ranks)" in said
    assert "161 all-reduces, 2.64 MB" in said
    assert "got 3" in draw("course model, 32 bits", 3, 0, 1).alt
    assert "shows nothing to others" in draw("llama-3-8b, 16 bits", 1, 0, 1).alt
    assert draw("llama-3-8b, 16 bits", 2, 31, 1) == draw("llama-3-8b, 16 bits", 2, 1, 1), "the last rank there is"


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="llama-3-70b"):
        layout_explorer("gpt-9")


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_a_ring_holds_what_it_adds_and_all_of_it_at_the_end(n: int) -> None:
    assert (summands(n, 0) == 1).all()
    halfway = summands(n, n - 1)
    assert (halfway == n).sum() == n, "each rank has added one part"
    assert sorted((halfway == n).argmax(1)) == list(range(n))
    assert (summands(n, 2 * (n - 1)) == n).all()


def test_the_stepper_counts_the_bytes_that_the_engine_sends() -> None:
    """Of the busiest rank at the end, for n parts of 1,024 bytes, and of a rank of the engine's ring."""
    for n in (3, 4):
        group = ThreadGroup(n)
        ranks = [group.rank(rank) for rank in range(n)]
        with ThreadPoolExecutor(n) as pool:
            list(pool.map(lambda rank, n=n: ring(rank, torch.zeros(256 * n)), ranks))
        said = ring_stepper("ring", n, 14).shown.alt
        assert f"Sent so far by the busiest rank: {ranks[0].num_bytes:,} bytes" in said
        assert f"{n * n} of {n * n} places hold the whole sum" in said


def test_the_stepper_says_what_moves() -> None:
    said = ring_stepper("tree", 8, 2).shown.alt
    assert "6 steps" in said
    assert "Step 2: 2 messages, such as 8,192 bytes from rank 2 to rank 0" in said
    assert "nothing is sent yet" in ring_stepper("two-shot", 4, 0).shown.alt
    assert "2 nodes of 4" in ring_stepper("hierarchical", 8, 3).shown.alt
    assert "expected a power of 2 ranks, got 6" in ring_stepper("recursive doubling", 6, 1).shown.alt
    with pytest.raises(ValueError, match="one-shot"):
        ring_stepper("all-gather")
