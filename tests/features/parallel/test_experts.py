"""Experts divided among ranks: logits and texts of one process, each rank reads and computes its own experts only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.shares import shares_of
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.models.moe import MixtureOfExperts
from tests.examples import examples
from tests.executor.forked import forked_workers  # noqa: F401
from tests.features.parallel.test_models import IDS, check, together
from tests.features.parallel.test_processes import forked_ranked, ranked, serve  # noqa: F401
from tests.features.parallel.test_schedules import check_alike, closing, workloads
from tests.features.parallel.test_schedules import serve as served
from tests.models.conftest import our_logits, save  # noqa: F401


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe", "qwen3_moe_mixed"])
def test_logits_are_those_of_one_process_and_no_expert_is_there_twice(variant: str, save: Any, our_logits: Any) -> None:  # noqa: F811
    _, folder = save(variant, torch.float64)
    whole = load_model(folder, torch.float64)
    assert whole.config.experts is not None
    count = whole.config.experts.num_experts
    for size in (2, 4):
        group = ThreadGroup(size)
        models = [load_model(folder, torch.float64, rank=RankModel(group.rank(i), by_expert=True)) for i in range(size)]
        check(whole, models, our_logits)
        for index, layer in enumerate(whole.layers):
            mixtures = [model.layers[index].mlp for model in models]
            assert all(
                isinstance(each, MixtureOfExperts) == isinstance(layer.mlp, MixtureOfExperts) for each in mixtures
            )
            if isinstance(layer.mlp, MixtureOfExperts):
                assert sum(len(each.experts.own) for each in mixtures) == count
        # Alone, one token: all but one rank have none to route.
        assert all(len(row) for row in together(models, lambda model: our_logits(model, [IDS[0][0]])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.conftest import _build

    path = tmp_path_factory.mktemp("experts")
    _build("qwen3_moe").to(torch.float64).save_pretrained(path)
    return path


@given(workload=workloads(), size=st.sampled_from([2, 4]))
@settings(max_examples=examples(10))
def test_texts_are_those_of_one_process(folder: Path, workload: Any, size: int) -> None:
    asked, options = workload
    plain = EngineConfig(num_blocks=200, prefix_cache="off", sampling_noise=options["sampling_noise"])
    expected = served(Engine(load_model(folder, torch.float64), plain), asked)
    config = EngineConfig(**options, tensor_parallel_size=size, enable_expert_parallel=True)
    with closing(ranked_engine(folder, config, dtype="float64", ranks="threads")) as engine:
        check_alike(served(engine, asked), expected)


def test_processes_count_the_rows_of_their_experts(forked_ranked, folder: Path) -> None:  # noqa: F811
    expected = serve(Engine(load_model(folder, torch.float32), EngineConfig(num_blocks=40)))
    config = EngineConfig(num_blocks=40, tensor_parallel_size=2, enable_expert_parallel=True)
    engine = forked_ranked(config, folder)
    assert serve(engine) == expected
    experts = load_model(folder).config.experts
    assert experts is not None
    tokens = sum(len(tokens) - 1 for tokens in expected)
    rows = [report.expert_rows for report in engine.executor.reports()]
    assert sum(rows) == tokens * experts.experts_per_token * len(experts.layers)
    assert all(rows)


def test_what_cannot_be_divided_is_refused_by_name(folder: Path, save: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="enable_expert_parallel: expected tensor_parallel_size above 1, got 1"):
        EngineConfig(enable_expert_parallel=True)
    _, dense = save("llama_biases", torch.float64)
    config = EngineConfig(num_blocks=40, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ValueError, match="expected a model with at least 2 experts, this has no experts"):
        ranked_engine(dense, config, ranks="threads")
    heads = dataclasses.replace(load_model(folder).config, num_heads=20, num_kv_heads=20)
    with pytest.raises(ValueError, match=r"expected a model with at least 20 experts, this has \d experts"):
        shares_of(heads, 20, by_expert=True)
