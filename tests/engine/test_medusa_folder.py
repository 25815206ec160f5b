"""Medusa heads in a folder: what is in it is what is computed, and what does not fit the model is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import ConfigError, course_model
from reference_impl.assembly.draft_folder import load_medusa_heads
from reference_impl.assembly.llm import LLM
from reference_impl.interfaces import SamplingParams
from reference_impl.models.loader import CheckpointError


def write_heads(folder: Path, **changes: Any) -> None:
    """With random weights, for the course target."""
    folder.mkdir()
    config = {"architectures": ["MedusaHeads"], "hidden_size": 256, "vocab_size": 4096, "num_heads": 3} | changes
    (folder / "config.json").write_text(json.dumps(config))
    size, random, tensors = config["hidden_size"], torch.Generator().manual_seed(0), {}
    for j in range(config["num_heads"]):
        tensors[f"heads.{j}.weight"] = 0.1 * torch.randn(size, size, generator=random)
        tensors[f"heads.{j}.bias"] = 0.1 * torch.randn(size, generator=random)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_a_file_holds_is_what_is_computed(tmp_path: Path) -> None:
    write_heads(tmp_path / "heads")
    heads = load_medusa_heads(tmp_path / "heads", torch.float64)
    tensors = load_file(tmp_path / "heads/model.safetensors")
    h = torch.randn(5, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for j, found in enumerate(heads.hidden_states(h).unbind(1)):
        expected = h + F.silu(h @ tensors[f"heads.{j}.weight"].double().T + tensors[f"heads.{j}.bias"].double())
        torch.testing.assert_close(found, expected)
    assert load_medusa_heads(tmp_path / "heads").dtype is torch.float32


@pytest.mark.parametrize("worker", ["here", "process"])
def test_a_folder_with_heads_is_known_by_what_is_in_it(tmp_path: Path, worker: str) -> None:
    write_heads(tmp_path / "heads")
    sampling = SamplingParams(max_tokens=12, temperature=0)
    texts = []
    for options in ({}, {"draft_model": tmp_path / "heads", "num_drafts": 2}):
        made = LLM(
            course_model("target"), "float64", num_blocks=32, max_model_len=256, worker=worker, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        with contextlib.closing(made.engine):
            texts.append(made.generate("def open_file(", sampling)[0].outputs[0].token_ids)
            drafts = sum(row.num_drafts for step in made.engine.trace.steps() for row in step.rows)
            assert (drafts > 0) == bool(options)
            assert made.engine.config.speculative == ("medusa" if drafts else "off")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "num_drafts", "expected"),
    [
        ({"vocab_size": 99}, 2, "expected the target's vocabulary of 4,096 tokens, found 99"),
        ({"hidden_size": 64}, 2, "expected a head for hidden states of 256 numbers, found 64"),
        ({}, 4, "expected a head for each of num_drafts=4 draft tokens, found 3: set num_drafts=3"),
        ({}, 0, "expected a head for each of num_drafts=4 draft tokens, found 3: set num_drafts=3"),
        ({"num_heads": 65}, 2, "num_heads: expected at most 64"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], num_drafts: int, expected: str
) -> None:
    write_heads(tmp_path / "heads", **changes)
    with pytest.raises(ConfigError, match=expected):
        LLM(course_model("target"), num_blocks=32, draft_model=tmp_path / "heads", num_drafts=num_drafts)


def test_what_is_asked_for_is_what_is_in_the_folder(tmp_path: Path) -> None:
    write_heads(tmp_path / "heads")
    target = course_model("target")
    with pytest.raises(ConfigError, match="Medusa heads draft for one: give it as draft_model"):
        LLM(tmp_path / "heads", num_blocks=32)
    with pytest.raises(ValueError, match="'eagle': expected 'medusa'"):
        LLM(target, num_blocks=32, draft_model=tmp_path / "heads", speculative="eagle")
    with pytest.raises(ValueError, match="'medusa': expected 'eagle'"):
        LLM(target, num_blocks=32, draft_model=course_model("eagle"), speculative="medusa")
    with pytest.raises(ValueError, match="speculative='medusa' needs a draft model, Medusa heads"):
        LLM(target, num_blocks=32, speculative="medusa")
    with pytest.raises(ConfigError, match=r"expected the config of Medusa heads, .* found \['FeatureHead'\]"):
        load_medusa_heads(course_model("eagle"))
    for tensors, expected in (
        ({"heads.0.weight": torch.zeros(256, 256)}, "missing tensors: heads.0.bias"),
        ({"lm_head.weight": torch.zeros(4096, 256)}, "lm_head.weight is not part of 3 Medusa heads"),
        ({"heads.0.weight": torch.full((256, 256), torch.nan)}, "heads.0.weight: expected .* found nan"),
        ({"heads.0.weight": torch.zeros(256, 255)}, r"expected shape \[256, 256\], found \[256, 255\]"),
    ):
        (tmp_path / "heads" / "model.safetensors").unlink()
        save_file(tensors, tmp_path / "heads" / "model.safetensors")
        with pytest.raises(CheckpointError, match=expected):
            LLM(target, num_blocks=32, draft_model=tmp_path / "heads", num_drafts=2)
