"""The table of sampling fields: each of SamplingParams once; a sampler that does not read one refuses it by name."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import CalledSampler
from reference_impl.core.sampler import SETTINGS, TorchSampler, settings_of
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.gumbel.triton import TritonGumbelSampler
from reference_impl.features.triton_sampler.sampler import TritonSampler
from reference_impl.interfaces import SamplingParams
from reference_impl.interfaces.sampling_fields import BY_SAMPLER, FIELDS

OTHER = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25}


def test_each_field_stands_in_the_table_once() -> None:
    assert [field.name for field in FIELDS] != []
    assert sorted(field.name for field in FIELDS) == sorted(field.name for field in fields(SamplingParams))


def test_a_fields_default_is_right() -> None:
    default = SamplingParams()
    assert all(field.is_right(default) for field in FIELDS)


@pytest.mark.parametrize("kind", [TorchSampler, TritonSampler, GumbelSampler, TritonGumbelSampler])
def test_a_sampler_takes_what_it_says_that_it_reads(kind: type[TorchSampler]) -> None:
    """A row of the table that no sampler knows fails here, and is refused until one reads it."""
    assert OTHER.keys() == {field.name for field in BY_SAMPLER}
    settings = np.array([settings_of(SamplingParams(**OTHER), 3, 0)], SETTINGS)
    columns = kind().columns(settings, np.array([5]))
    assert set(kind.reads) <= columns.keys()
    for name in kind.reads:
        assert columns[name][0] == OTHER[name]


class WithoutMinP(CalledSampler):
    reads = TorchSampler.reads - {"min_p"}


@pytest.mark.parametrize("value", [0.25, 1.0])
def test_a_field_that_the_sampler_does_not_read_is_refused_by_name(random_model: Any, value: float) -> None:
    engine = Engine(random_model("float32"), EngineConfig(num_blocks=4), Parts(sampler=WithoutMinP()))
    with pytest.raises(
        ValueError, match=rf"SamplingParams.min_p: expected 0.0, got {value}: the sampler of .* does not"
    ):
        engine.add([1], SamplingParams(min_p=value, max_tokens=1))
    engine.add([1], SamplingParams(top_p=0.5, max_tokens=1))
    assert len(engine.requests) == 1


def test_a_function_that_is_asked_reads_the_request_itself(random_model: Any) -> None:
    asked = Engine(random_model("float32"), EngineConfig(num_blocks=4), Parts(sampler=lambda logits, requests: None))
    assert set(asked.executor.reads) == OTHER.keys()
