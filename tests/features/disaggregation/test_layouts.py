"""Which bytes of a page each rank of a layout has: what one layout writes another reads, to the byte."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.assembly.model import load_model
from reference_impl.assembly.planner_half import pages_of
from reference_impl.assembly.worker_half import kv_specs_of
from reference_impl.core.decoder import Decoder
from reference_impl.features.disaggregation.layouts import (
    Move,
    PageFormat,
    RankPart,
    moves,
    page_format,
    part_bytes,
    rank_parts,
    runs,
)
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.stages import StageModel
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.facts import Facts, ModelFacts
from reference_impl.features.transfer.cache import CachePages
from reference_impl.features.transfer.seals import SEAL_BYTES
from reference_impl.interfaces import KVSpec, MovesScales, Page
from reference_impl.models.identity import weights_of

NUM_LAYERS, HEAD_DIM = 5, 4
HEADS = [(6, 3), (8, 2), (4, 4), (4, 1), (12, 4), (6, 6)]  # query heads, KV heads
WHOLE = range(NUM_LAYERS)
STAGES = [[WHOLE], [range(2), range(2, 5)], [range(1), range(1, 4), range(4, 5)]]


def format_of(num_kv_heads: int, kv_dtype: str = "auto", block_size: int = 16, **change: Any) -> PageFormat:
    spec = KVSpec(NUM_LAYERS, num_kv_heads, HEAD_DIM, block_size, **widths(kv_dtype, torch.float32))
    names = {"fingerprint": "abc", "kv_format": kv_dtype, "dtype": "torch.float32"}
    return page_format(spec, NUM_LAYERS, num_kv_heads, **names | change)


def layouts_of(pages: PageFormat, num_heads: int, sizes: Sequence[int]) -> list[list[RankPart]]:
    """Those that the heads allow."""
    found = []
    for size, stages in itertools.product(sizes, STAGES):
        copies = size / pages.num_kv_heads
        if copies <= 1 or (copies == int(copies) and num_heads // pages.num_kv_heads >= copies):
            found.append(rank_parts(pages, num_heads, size, stages))
    return found


def parts_by_hand(page: bytes, pages: PageFormat, layout: Sequence[RankPart]) -> list[bytes]:
    whole = np.frombuffer(page[:-SEAL_BYTES], np.uint8).reshape(pages.num_layers, pages.num_kv_heads, -1)
    return [whole[list(part.layers)][:, list(part.heads)].tobytes() for part in layout]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_what_one_layout_writes_another_reads(num_heads: int, num_kv_heads: int, kv_dtype: str) -> None:
    pages = format_of(num_kv_heads, kv_dtype)
    writing, reading = (layouts_of(pages, num_heads, sizes) for sizes in ((1, 2, 3), (1, 2, 3, 4)))
    assert len(writing) >= 3 * 2
    assert len(reading) >= 3 * 2
    page = random.Random(num_heads).randbytes(pages.page_bytes)
    for sources, targets in itertools.product(writing, reading):
        sent = parts_by_hand(page, pages, sources)
        for source in range(len(sources)):
            if not sources[source].is_writer:
                sent[source] = bytes(len(sent[source]))  # what a rank that does not write has is not asked for
        came = [bytearray(len(part)) for part in parts_by_hand(page, pages, targets)]
        written = [np.zeros(len(part), np.uint8) for part in came]
        for source, target, at, to, length in moves(pages, sources, targets):
            assert at + length <= len(sent[source])
            came[target][to : to + length] = sent[source][at : at + length]
            written[target][to : to + length] += 1
        assert all((counts == 1).all() for counts in written)
        assert came == parts_by_hand(page, pages, targets)
        assert [part_bytes(pages, part) for part in targets] == [len(part) for part in came]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_the_writers_of_a_layout_write_each_byte_of_a_page_once(num_heads: int, num_kv_heads: int) -> None:
    pages = format_of(num_kv_heads)
    for layout in layouts_of(pages, num_heads, (1, 2, 3, 4)):
        counts = np.zeros(pages.page_bytes - SEAL_BYTES, np.uint8)
        for part in layout:
            at = 0
            for run in runs(pages, part):
                assert run.in_part == at
                at += run.length
                counts[run.in_page : run.in_page + run.length] += part.is_writer
            assert at == part_bytes(pages, part)
        assert (counts == 1).all()


def test_ranks_that_repeat_a_head_read_it_and_one_writes_it() -> None:
    pages = format_of(2)
    layout = rank_parts(pages, 8, 4, [WHOLE])
    assert [part.heads for part in layout] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [part.is_writer for part in layout] == [True, False, True, False]
    whole = rank_parts(pages, 8, 1, [WHOLE])
    assert moves(pages, whole, whole) == [Move(0, 0, 0, 0, pages.page_bytes - SEAL_BYTES)]
    assert {move.source for move in moves(pages, layout, whole)} == {0, 2}
    assert {move.target for move in moves(pages, whole, layout)} == {0, 1, 2, 3}
    unequal = rank_parts(format_of(3), 6, 2, [WHOLE])
    assert [part.heads for part in unequal] == [range(2), range(2, 3)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8", "int4"])
def test_a_ranks_part_is_the_page_of_a_cache_with_its_heads_and_layers(kv_dtype: str) -> None:
    """Caches of ranks, with blocks of 16, 32 and 48 tokens, are filled from one whole cache through pages."""

    def cache_of(num_layers: int, num_heads: int, block_size: int) -> Any:
        spec = KVSpec(num_layers, num_heads, HEAD_DIM, block_size, **widths(kv_dtype, torch.float32))
        return kv_cache([spec], 2, torch.float32, torch.device("cpu"), kv_dtype=kv_dtype)

    pages, place = format_of(3, kv_dtype), Page(b"", 1, 0)
    whole = cache_of(NUM_LAYERS, 3, 16)
    for tensor in whole.blocks:
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor.dtype))
    page = bytearray(pages.page_bytes - SEAL_BYTES)
    list(CachePages(whole).gather_pages([place], WHOLE, [memoryview(page)]))
    for part in rank_parts(pages, 6, 2, STAGES[1]):
        layers, heads = (slice(each.start, each.stop) for each in (part.layers, part.heads))
        own = cache_of(len(part.layers), len(part.heads), 48)
        content = b"".join(page[run.in_page : run.in_page + run.length] for run in runs(pages, part))
        target = Page(b"", 0, 2)
        CachePages(own).scatter_pages([target], range(len(part.layers)), [memoryview(content)])
        found = own.data[:, :, 0, 32:48].view(torch.uint8)
        assert (found == whole.data[layers, :, 1, :, heads].view(torch.uint8)).all()
        if isinstance(own, MovesScales):
            assert (own.scale_of_slots[:, :, 0, 32:48] == whole.scale_of_slots[layers, :, 1, :, heads]).all()
        again = bytearray(len(content))
        list(CachePages(own).gather_pages([target], range(len(part.layers)), [memoryview(again)]))
        assert again == content


def test_stages_and_ranks_that_do_not_fit_are_refused() -> None:
    pages = format_of(2)
    for stages in ([range(4)], [range(2), range(3, 5)], [range(5), range(5, 5)], [range(2, 5), range(2)]):
        with pytest.raises(ValueError, match="stages: expected all 5 layers in order, in each at least one, got"):
            rank_parts(pages, 4, 1, stages)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected a number of ranks"):
        rank_parts(pages, 4, 3, [WHOLE])


def test_formats_are_the_same_for_other_blocks_ranks_and_stages() -> None:
    pages = format_of(4)
    for block_size in (32, 48, 160):
        pages.check_meets(format_of(4, block_size=block_size))
    rank = KVSpec(2, 1, HEAD_DIM, 64, layers=(3, 4), bits_per_value=32)
    names = {"fingerprint": "abc", "kv_format": "auto", "dtype": "torch.float32"}
    pages.check_meets(page_format(rank, NUM_LAYERS, 4, **names))
    assert pages.root() == page_format(rank, NUM_LAYERS, 4, **names).root()


def test_ranks_stages_and_a_checkpoint_in_shards_have_the_format_of_the_whole_model(tmp_path: Path) -> None:
    folder = course_model("draft")
    whole = load_model(folder, torch.float32)
    shutil.copytree(folder, tmp_path / "shards")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "shards" / "model.safetensors").unlink()
    index = {name: f"{1 + at % 2}.safetensors" for at, name in enumerate(tensors)}
    for file in set(index.values()):
        own = {name: tensor for name, tensor in tensors.items() if index[name] == file}
        save_file(own, tmp_path / "shards" / file, {"format": "pt"})
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    group, stages = ThreadGroup(2), [range(1), range(1, 2)]
    models = [
        load_model(tmp_path / "shards", torch.float32),
        *(load_model(folder, torch.float32, rank=RankModel(group.rank(rank))) for rank in range(2)),
        *(load_model(folder, torch.float32, rank=StageModel(group.rank(rank), stages)) for rank in range(2)),
    ]

    def pages(model: Decoder, block_size: int, **options: Any) -> PageFormat:
        config = EngineConfig(block_size=block_size, **options)
        facts = ModelFacts(model.config.whole, str(model.dtype), "cpu", weights_of(model))
        specs = kv_specs_of(model.config, model.dtype, config, 128)
        return pages_of(config, Facts(facts, specs, 1, 0, 1, 128, True, frozenset()))

    expected = pages(whole, 16)
    assert [pages(model, block_size) for model, block_size in zip(models, (16, 32, 48, 64, 16), strict=True)] == (
        [expected] * 5
    )
    assert pages(whole, 16, prefix_cache="radix") == expected
    for other in (pages(whole, 8), pages(whole, 16, kv_dtype="int8"), pages(load_model(folder, torch.float64), 16)):
        assert other.root() != expected.root()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (format_of(4, fingerprint="abd"), "fingerprint: 'abc' here, 'abd' there"),
        (format_of(4, "fp8"), "kv_format: 'auto' here, 'fp8' there; page_bytes: "),
        (format_of(4, dtype="torch.float16"), "dtype: 'torch.float32' here, 'torch.float16' there"),
        (format_of(2), "num_kv_heads: 4 here, 2 there"),
        (format_of(4, block_size=8), "blocks of multiples of 16 tokens. page_tokens: 16 here, 8 there"),
        (replace(format_of(4), layout=4), "layout: 3 here, 4 there"),
    ],
)
def test_workers_whose_pages_differ_are_refused_with_each_difference(other: PageFormat, says: str) -> None:
    with pytest.raises(ValueError, match="cannot exchange pages") as caught:
        format_of(4).check_meets(other)
    assert says in str(caught.value)
    assert format_of(4).root() != other.root()


def test_a_window_or_a_latent_has_no_pages() -> None:
    spec = KVSpec(2, 1, 4, 16, bits_per_value=32, window=9)
    names = {"fingerprint": "", "kv_format": "auto", "dtype": ""}
    with pytest.raises(ValueError, match="keys and values of all tokens, got a window of 9 tokens"):
        page_format(spec, 2, 1, **names)
    with pytest.raises(ValueError, match="keys and values of all tokens, got latent"):
        page_format(replace(spec, window=None, kind="latent"), 2, 1, **names)


def test_a_format_comes_back_as_it_was_said() -> None:
    for pages in (format_of(4), format_of(1, "int4")):
        assert PageFormat.from_json(pages.to_json()) == pages
        assert PageFormat.from_json(memoryview(pages.to_json())) == pages


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0}, {"num_layers": True}, {"num_layers": 5.0}, {"num_kv_heads": -1}, {"page_bytes": 1 << 50},
        {"page_bytes": 8}, {"page_bytes": 9}, {"head_dim": None}, {"fingerprint": 3}, {"kv_format": "a" * 300},
        {"more": 1}, {"dtype": ["torch.float32"]},
    ],
)  # fmt: skip
def test_a_format_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    said = json.loads(format_of(4).to_json()) | change
    with pytest.raises(ValueError, match=r"expected|unexpected"):
        PageFormat.from_json(json.dumps(said).encode())


@given(st.binary(max_size=60) | st.text('[]{}"1,:', max_size=60).map(str.encode))
def test_whatever_a_peer_says_is_a_format_or_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="expected the format of a worker's pages"):
        PageFormat.from_json(content)
    with pytest.raises(ValueError, match="as JSON"):
        PageFormat.from_json(b"[" * 100_000)
