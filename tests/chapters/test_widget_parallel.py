"""The layout explorer of chapter 12: every control at both ends, and the bytes and shares that the engine has."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from chapters.widgets import layout_explorer
from chapters.widgets.layout_explorer import COURSE, MODELS, SIZES, draw, layout
from reference_impl.assembly.config import course_model
from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.threads import ThreadGroup


def ends(control: Any) -> tuple[Any, Any]:
    if hasattr(control, "options"):
        return control.options[0], control.options[-1]
    return control.min, control.max


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends() -> None:
    view = layout_explorer()
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
