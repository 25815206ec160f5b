"""`LLM.update_weights`: what a request wrote stays, each later token is the new model's, and nothing of the old one is
found in a cache."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.detokenizer import TextStream
from reference_impl.features.transfer.folder import FolderStore
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import Recipe
from tests.examples import examples
from tests.executor.forked import forked_workers  # noqa: F401

FOLDER = Path(course_model("draft"))
PROMPT = random.Random(1).choices(range(3, 200), k=21)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same shape, with other weights."""
    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(FOLDER, folder)
    tensors, noise = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, old in tensors.items():
        tensors[name] = (old.double() * (1 + 0.4 * torch.randn(old.shape, generator=noise))).to(old.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(folder, **({"dtype": "float64", "num_blocks": 64, "block_size": 4} | options))
    try:
        yield llm
    finally:
        llm.engine.close()


def tokens(llm: LLM, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY) -> list[int]:
    [output] = llm.generate(prompt, sampling)
    return output.token_ids


def check_goes_on(llm: LLM, fresh: LLM, asked: list[tuple[list[int], SamplingParams]], num_steps: int) -> None:
    """Runs the requests, updates the weights of `llm` to those of `fresh` after so many steps, and compares."""
    running = [llm.start(prompt, sampling) for prompt, sampling in asked]
    for _ in range(num_steps):
        llm.step()
    assert fresh.folder is not None
    llm.update_weights(fresh.folder)
    before = [list(each.request.tokens) for each in running]
    while any(each.unfinished for each in running):
        llm.step()
    for each, (prompt, sampling), known in zip(running, asked, before, strict=True):
        found, left = each.request.tokens, sampling.max_tokens - (len(known) - len(prompt))
        assert found[: len(known)] == known
        stream = TextStream(llm.tokenizer, prompt, ())
        assert each.output().text == "".join(map(stream.push, found[len(prompt) :])) + stream.finish()
        if left:
            rest = SamplingParams(
                max_tokens=left, temperature=sampling.temperature, seed=sampling.seed, ignore_eos=True
            )
            assert found[len(known) :] == tokens(fresh, known, rest)
        llm.leave(each)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[list[int], SamplingParams]], int, dict[str, Any]]:
    shared = PROMPT[: draw(st.integers(0, 16))]
    asked = [
        (
            [*shared, *random.Random(i).choices(range(3, 200), k=draw(st.integers(1, 12)))],
            SamplingParams(
                max_tokens=draw(st.integers(1, 12)),
                temperature=draw(st.sampled_from([0.0, 0.9])),
                seed=i,
                ignore_eos=True,
            ),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    longest = max(len(prompt) + sampling.max_tokens for prompt, sampling in asked)
    return asked, draw(st.integers(0, 14)), {
        "num_blocks": -(-longest // 4) + draw(st.sampled_from([1, 3, 30])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 9, 200])),
        "prefix_cache": draw(st.sampled_from(["off", "hash", "radix"])),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "overlap": draw(st.sampled_from(["auto", "off"])),
        "speculative": draw(st.sampled_from(["off", "off", "ngram", "early-exit", "lookahead"])),
    }  # fmt: skip


@settings(max_examples=examples(25))
@given(workloads())
def test_whatever_the_schedule_later_tokens_are_those_of_the_new_weights(other: Path, workload: Any) -> None:
    asked, num_steps, options = workload
    with engine_of(FOLDER, **options) as llm, engine_of(other) as fresh:
        check_goes_on(llm, fresh, asked, num_steps)


@pytest.mark.parametrize(
    "options",
    [
        {"worker": "process"},
        {"worker": "threads", "tensor_parallel_size": 2},
        {"worker": "threads", "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.usefixtures("forked_workers")
def test_workers_and_ranks_take_new_weights_and_refuse_wrong_ones(other: Path, tmp_path: Path, options: Any) -> None:
    with engine_of(FOLDER, **options) as llm, engine_of(other) as fresh:
        old = tokens(llm)
        with pytest.raises((ValueError, CheckpointError), match="missing tensors: model.norm.weight"):
            llm.update_weights(without(other, "model.norm.weight", tmp_path / "cut"))
        assert tokens(llm) == old
        check_goes_on(llm, fresh, [(PROMPT, GREEDY), (PROMPT[3:], GREEDY)], 5)
        assert tokens(llm) == tokens(fresh) != old


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")]
)
def test_weights_that_are_rounded_or_packed_while_they_are_loaded_are_replaced(
    other: Path, dtype: str, quantization: str
) -> None:
    with (
        engine_of(FOLDER, dtype=dtype, quantization=quantization) as llm,
        engine_of(other, dtype=dtype, quantization=quantization) as fresh,
    ):
        tokens(llm)  # so that copies of the head are made
        llm.update_weights(other)
        found, expected = (
            each.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, logprobs=1)) for each in (llm, fresh)
        )
        assert found[0].token_ids == expected[0].token_ids
        assert found[0].logprobs == expected[0].logprobs


def test_a_pinned_prefix_of_old_weights_is_not_used(other: Path) -> None:
    with engine_of(FOLDER) as llm, engine_of(other) as fresh:
        tokens(llm)
        pin = llm.engine.pin(PROMPT[:16])
        assert len(pin.blocks) == 4
        llm.update_weights(other)
        request = llm.engine.add(PROMPT, GREEDY)
        while llm.engine.has_work():
            llm.engine.step()
        assert (request.num_cached_tokens, request.output_tokens) == (0, tokens(fresh))
        llm.engine.unpin(pin)
        assert llm.engine.kv.num_available == llm.engine.num_blocks


def without(folder: Path, name: str, at: Path) -> Path:
    shutil.copytree(folder, at)
    tensors = load_file(at / "model.safetensors")
    del tensors[name]
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    return at


def test_a_folder_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "wider")
    path = tmp_path / "wider" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.25}), "utf-8")
    with engine_of(FOLDER) as llm:
        old = tokens(llm)
        with pytest.raises(ValueError, match=r"got another model's: norm_eps 0\.25 in place of"):
            llm.update_weights(path.parent)
        assert tokens(llm) == old


def test_weights_that_are_stored_otherwise_are_refused_though_their_tensors_have_one_shape(tmp_path: Path) -> None:
    """Round to nearest with 8 bits is one set of tensors, whether activations are rounded, too, or not."""
    for method in ("int8", "w8a8"):
        quantize_folder(Job(FOLDER, tmp_path / method, Recipe(scheme=method)))
    with engine_of(tmp_path / "int8", dtype="float32") as llm:
        old = tokens(llm)
        for folder in (tmp_path / "w8a8", FOLDER):
            with pytest.raises(ValueError, match="expected weights that are stored as those in use"):
                llm.update_weights(folder)
        llm.update_weights(tmp_path / "int8")
        assert tokens(llm) == old
    with engine_of(FOLDER) as llm, pytest.raises(ValueError, match="or plain as they are, got others"):
        llm.update_weights(tmp_path / "w8a8")


def test_what_keeps_old_keys_and_values_is_refused_by_name(other: Path, tmp_path: Path) -> None:
    stored = Parts(page_store=FolderStore(tmp_path / "pages"))
    with (
        engine_of(FOLDER, parts=stored) as llm,
        pytest.raises(ValueError, match="update_weights with a page store: its"),
    ):
        llm.update_weights(other)
    with engine_of(FOLDER) as llm:
        llm.engine.add(PROMPT, GREEDY, "held", holds=True)
        with pytest.raises(ValueError, match="update_weights with a beam search under way"):
            llm.update_weights(other)
        llm.engine.abort("held")
        with pytest.raises(ValueError, match=r"x\.gguf: of a GGUF file only a new engine is made"):
            llm.update_weights(tmp_path / "x.gguf")
        with pytest.raises((ConfigError, FileNotFoundError, ValueError)):
            llm.update_weights(tmp_path / "nothing")


def test_where_weights_are_replaced_in_part_the_engine_is_lost(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("in the middle")

    with engine_of(FOLDER) as llm:
        llm.start(PROMPT, GREEDY)
        monkeypatch.setattr(llm.engine.executor, "use_weights", fail)
        with pytest.raises(MemoryError):
            llm.update_weights(other)
        with pytest.raises(RuntimeError, match="make a new engine"):
            llm.step()
