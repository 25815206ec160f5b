"""GGUF files with something wrong in them, built by hand and chosen by hypothesis: cut off, wrong counts, lengths,
types, shapes, kinds and offsets, lists in lists, scales that are no numbers, metadata that cannot be. Each is one error
that names the file, and of tensors the tensor; or, where a value may be that as well, the same model."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from reference_impl.assembly.model import load_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.models import gguf_file
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.gguf_file import GgufFile
from reference_impl.models.gguf_model import gguf_config
from reference_impl.models.gguf_tokenizer import gguf_tokenizer, special_tokens
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.gguf_blocks import BLOCKS, HALVES, check_blocks, decode_blocks
from tests.models.test_gguf import KINDS, some_blocks

IDS = [3, 1, 4, 1, 5]
U32, F32, STRING, ARRAY = 4, 6, 8, 9
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BIG = (1, 7, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
Kinds = {"token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "MXFP4", "attn_output": "IQ4_NL",
         "ffn_gate": "Q5_1", "ffn_up": "F16", "ffn_down": "Q5_0", "output": "Q4_1"}  # fmt: skip


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def packed(value: Any, kind: int | None = None) -> bytes:
    """A value of metadata with its type before it. kind: of a number; else uint32, float32, or int32 if negative."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, list):
        own = packed(value[0])[:4] if value else struct.pack("<I", U32)
        return struct.pack("<I", ARRAY) + own + struct.pack("<Q", len(value)) + b"".join(packed(v)[4:] for v in value)
    if kind is None:
        kind = 7 if isinstance(value, bool) else F32 if isinstance(value, float) else 5 if value < 0 else U32
    return struct.pack(f"<I{FORMS[kind]}", kind, value)


@dataclass
class Parts:
    """A file before it is put together. infos: name -> (sizes, innermost first; kind; offset); None: as it must be."""

    fields: dict[str, bytes]
    data: dict[str, tuple[tuple[int, ...], int, bytes]]
    infos: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)

    def header(self) -> bytes:
        tensors, fields = (
            len(part) if asked is None else asked
            for part, asked in zip((self.data, self.fields), self.counts, strict=True)
        )
        found, offset = struct.pack("<4sIQQ", b"GGUF", self.version, tensors, fields), 0
        for name, value in self.fields.items():
            found += text(name) + value
        for name, (sizes, kind, data) in self.data.items():
            sizes, kind, at = self.infos.get(name, (sizes, kind, offset))
            found += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, at)
            offset += len(data) + -len(data) % 32
        return found

    def whole(self) -> bytes:
        found = self.header()
        for _, _, data in self.data.values():
            found += b"\0" * (-len(found) % 32) + data
        return found + b"\0" * (-len(found) % 32)


def make_parts() -> Parts:
    """A llama of one layer, 32 wide, each matrix in a kind of its own, with a tokenizer of 8 tokens."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "c"]
    fields = {
        "general.architecture": "llama", "llama.embedding_length": 32, "llama.block_count": 1,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 7 + [-1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1], "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    shapes = {
        "token_embd": (8, 32), "blk.0.attn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,), "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64), "output_norm": (32,), "output": (8, 32),
    }  # fmt: skip
    draw, data = np.random.default_rng(0), {}
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = Kinds.get(name.rpartition(".")[2], "F32")
        values = draw.uniform(0.5, 1.5, shape).astype(np.float32)
        blocks = some_blocks(kind, *shape, seed) if kind in BLOCKS else gguf.quants.quantize(values, KINDS[kind])
        data[f"{name}.weight"] = shape[::-1], int(KINDS[kind]), blocks.tobytes()
    return Parts({name: packed(value) for name, value in fields.items()}, data)


PARTS = make_parts()
NAMES = sorted(PARTS.data)
QUANTIZED = sorted(name for name in NAMES if Kinds.get(name.split(".")[-2]) in BLOCKS)


def logits_of(path: Path) -> Tensor:
    model = load_model(path, torch.float32, max_position=8)
    batch = ragged_batch([(IDS, 0)], len(IDS), model.device)
    with torch.inference_mode():
        return model(batch, None, RecomputeAttention(model.config.attention_scale))


Outcome = Callable[[bytes], str | None]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """outcome(file) -> the error that loading it ends with, or None: then logits are those of the whole file."""
    path = tmp_path_factory.mktemp("fuzzed") / "a.gguf"
    path.write_bytes(PARTS.whole())
    expected = logits_of(path)

    def load(data: bytes) -> str | None:
        path.write_bytes(data)
        try:
            found = logits_of(path)
        except (ConfigError, CheckpointError) as wrong:  # any other fails the test
            error = str(wrong)
        else:
            error = None
        assert error is None or str(path) in error, "the file is not named"
        if error is not None:
            return error
        assert torch.equal(found, expected), "it was loaded as another model"
        return None

    return load


def fuzzed(number: int) -> Callable[..., Any]:
    return settings(
        max_examples=number, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
    )  # fmt: skip


def error_of(outcome: Outcome, data: bytes) -> str:
    found = outcome(data)
    assert found is not None, "it was loaded"
    return found


def test_what_is_whole_is_loaded(outcome: Outcome) -> None:
    assert outcome(PARTS.whole()) is None


def test_it_is_what_the_package_gguf_writes(tmp_path: Path) -> None:
    """Byte for byte: so what is built here by hand is the format."""
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    for name, value in PARTS.fields.items():
        if name == "general.architecture":
            continue
        kind = gguf.GGUFValueType(struct.unpack("<I", value[:4])[0])
        if kind is gguf.GGUFValueType.ARRAY:
            continue
        number = value[12:].decode() if kind is gguf.GGUFValueType.STRING else struct.unpack(
            f"<{FORMS[kind]}", value[4:]
        )[0]  # fmt: skip
        writer.add_key_value(name, number, kind)
    for name, (sizes, kind, data) in PARTS.data.items():
        rows = np.frombuffer(data, dtype=np.uint8).reshape(*sizes[:0:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    without = {name: value for name, value in PARTS.fields.items() if value[:4] != struct.pack("<I", ARRAY)}
    assert (tmp_path / "b.gguf").read_bytes() == replace(PARTS, fields=without).whole()


def test_a_file_cut_off_anywhere_is_an_error(outcome: Outcome) -> None:
    whole = PARTS.whole()
    end = len(whole) - len(whole) % 32 - 32

    @fuzzed(60)
    @given(place=st.integers(0, end))
    def check(place: int) -> None:
        error_of(outcome, whole[:place])

    check()


def test_counts_of_tensors_and_metadata_that_lie_are_errors(outcome: Outcome) -> None:
    tensors, fields = len(PARTS.data), len(PARTS.fields)
    counts = st.one_of(st.integers(0, 40), st.sampled_from(BIG))

    @fuzzed(60)
    @given(one=counts, other=st.sampled_from((None, 0, 1)), swapped=st.booleans())
    def check(one: int, other: int | None, swapped: bool) -> None:
        asked = (other, one) if swapped else (one, other)
        assume(any(a not in (None, own) for a, own in zip(asked, (tensors, fields), strict=True)))
        error_of(outcome, replace(PARTS, counts=asked).whole())

    check()


def test_a_tensor_of_another_shape_is_named(outcome: Outcome) -> None:
    sizes = st.lists(st.one_of(st.sampled_from((0, 1, 8, 16, 32, 64)), st.sampled_from(BIG)), max_size=6)

    @fuzzed(100)
    @given(name=st.sampled_from(NAMES), sizes=sizes, change=st.sampled_from(("new", "swapped", "one more", "split")))
    def check(name: str, sizes: list[int], change: str) -> None:
        shape, kind, _ = PARTS.data[name]
        found = {
            "new": tuple(sizes), "swapped": shape[::-1], "one more": (*shape, 1),
            "split": (*shape[:-1], shape[-1] // 2, 2),
        }[change]  # fmt: skip
        assume(found != shape)
        error = error_of(outcome, replace(PARTS, infos={name: (found, kind, offset_of(name))}).whole())
        assert "tensor" in error or "fit" in error

    check()


def offset_of(name: str) -> int:
    offset = 0
    for other, (_, _, data) in PARTS.data.items():
        if other == name:
            break
        offset += len(data) + -len(data) % 32
    return offset


def test_a_tensor_that_lies_elsewhere_or_in_another_is_named(outcome: Outcome) -> None:
    starts = [offset_of(name) for name in NAMES]

    @fuzzed(60)
    @given(
        name=st.sampled_from(NAMES),
        offset=st.one_of(st.sampled_from(starts), st.integers(0, 9000), st.sampled_from(BIG)),
    )
    def check(name: str, offset: int) -> None:
        shape, kind, _ = PARTS.data[name]
        assume(offset != offset_of(name))
        error = error_of(outcome, replace(PARTS, infos={name: (shape, kind, offset)}).whole())
        assert f"tensor '{name}'" in error
        assert "expected its bytes from" in error

    check()


def padded_bytes(name: str, kind: int) -> int | None:
    """That a tensor takes in a file, if it is of this kind; None: there is no such kind."""
    if kind not in map(int, KINDS):
        return None
    numbers, size = gguf.GGML_QUANT_SIZES[KINDS(kind)]
    found = math.prod(PARTS.data[name][0]) // numbers * size
    return found + -found % 32


def test_a_tensor_of_another_kind_is_named(outcome: Outcome) -> None:
    """But of one that takes as many bytes, filled up: nothing in a file says which of them it is."""
    kinds = st.sampled_from([int(kind) for kind in gguf.GGML_QUANT_SIZES])

    @fuzzed(80)
    @given(name=st.sampled_from(NAMES), kind=st.one_of(kinds, st.integers(0, 2**32 - 1)))
    def check(name: str, kind: int) -> None:
        shape, own, _ = PARTS.data[name]
        assume(padded_bytes(name, kind) != padded_bytes(name, own))
        error = error_of(outcome, replace(PARTS, infos={name: (shape, kind, offset_of(name))}).whole())
        assert "tensor" in error

    check()


def test_strings_and_lists_of_absurd_length_are_errors(outcome: Outcome) -> None:
    whole = PARTS.whole()
    strings = [PARTS.header().index(text(name)) for name in (*PARTS.fields, *NAMES)]
    lists = [whole.index(value) + 8 for value in PARTS.fields.values() if value[:4] == struct.pack("<I", ARRAY)]

    @fuzzed(80)
    @given(place=st.sampled_from(strings + lists), length=st.one_of(st.integers(0, 300), st.sampled_from(BIG)))
    def check(place: int, length: int) -> None:
        assume(struct.unpack_from("<Q", whole, place)[0] != length)
        error_of(outcome, whole[:place] + struct.pack("<Q", length) + whole[place + 8 :])

    check()


def test_limits_hold_where_a_file_is_long_enough_for_what_it_says(outcome: Outcome, monkeypatch) -> None:
    """Of a list that fits into a file of many gigabytes the numbers would take eight times as much memory."""
    monkeypatch.setattr(gguf_file, "_MOST_ENTRIES", 200)
    monkeypatch.setattr(gguf_file, "_LONGEST", 100)
    assert outcome(PARTS.whole()) is None
    for value, message in (
        (packed([1] * 180), "expected at most 200 entries of lists, found"),
        (
            struct.pack("<IIQ", ARRAY, ARRAY, 9) + (struct.pack("<IQ", 0, 20) + b"\0" * 20) * 9,
            "expected at most 200 entries",
        ),
        (packed("x" * 101), "expected a string of at most 100 bytes at .* found 101"),
    ):
        error = error_of(outcome, replace(PARTS, fields=PARTS.fields | {"extra": value}).whole())
        assert re.search(message, error), error


@pytest.mark.parametrize("depth", [3, 4, 1000, 50_000])
def test_lists_in_lists_in_lists_are_an_error(depth: int, outcome: Outcome) -> None:
    value = struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQI", U32, 1, 7)
    error = error_of(outcome, replace(PARTS, fields=PARTS.fields | {"extra": value}).whole())
    assert "expected lists at most 2 deep, found a deeper one" in error


def test_a_list_in_a_list_is_read(outcome: Outcome) -> None:
    value = struct.pack("<IIQ", ARRAY, ARRAY, 2) + struct.pack("<IQII", U32, 2, 7, 8) + struct.pack("<IQ", STRING, 0)
    assert outcome(replace(PARTS, fields=PARTS.fields | {"extra": value}).whole()) is None


def test_a_name_that_comes_twice_is_an_error(outcome: Outcome) -> None:
    whole = PARTS.whole()
    error = error_of(outcome, whole.replace(b"llama.context_length", b"general.architecture"))
    assert "metadata 'general.architecture' came a second time" in error
    error = error_of(outcome, whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    assert "tensor 'blk.0.attn_v.weight' came a second time" in error
    error = error_of(outcome, whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_w.weight"))
    assert "tensor 'blk.0.attn_w.weight' is not part of a LlamaForCausalLM in GGUF" in error


def test_types_of_metadata_that_are_none_or_others_are_errors(outcome: Outcome) -> None:
    """Or, of a number that is the same in both, the same model."""
    whole, header = PARTS.whole(), PARTS.header()
    places = {name: header.index(text(name)) + 8 + len(name.encode()) for name in PARTS.fields}

    @fuzzed(80)
    @given(name=st.sampled_from(sorted(places)), kind=st.one_of(st.integers(0, 14), st.integers(0, 2**32 - 1)))
    def check(name: str, kind: int) -> None:
        place = places[name]
        outcome(whole[:place] + struct.pack("<I", kind) + whole[place + 4 :])

    check()
    place = places["llama.block_count"]
    error = error_of(outcome, whole[:place] + struct.pack("<I", 13) + whole[place + 4 :])
    assert "expected a type 0 to 12, found 13" in error


ANY = st.one_of(
    st.integers(0, 2**32 - 1), st.integers(-(2**31), -1), st.floats(width=32), st.booleans(), st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=9), st.lists(st.text(max_size=3), max_size=9),
    st.lists(st.floats(width=32), min_size=8, max_size=8),
)  # fmt: skip


def error_in(read: Callable[[GgufFile], object], path: Path) -> str:
    """The error that reading a file ends with; without one its path. Any other than these two fails the test."""
    try:
        read(GgufFile(path))
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return str(path)


def test_any_field_may_be_anything(tmp_path: Path) -> None:
    """Of the config and of the tokenizer: an error that names the file, or something that can be."""
    path = tmp_path / "a.gguf"
    known = sorted(name for name in PARTS.fields)
    others = ["general.alignment", "split.count", "llama.rope.scaling.type", "llama.attention.key_length",
              "llama.expert_count", "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token",
              "tokenizer.ggml.unknown_token_id", "tokenizer.huggingface.json", "tokenizer.ggml.eot_token_id",
              "llama.attention.sliding_window", "tokenizer.ggml.add_space_prefix"]  # fmt: skip

    @fuzzed(200)
    @given(name=st.sampled_from(known + others), value=ANY, gpt2=st.booleans())
    def check(name: str, value: Any, gpt2: bool) -> None:
        fields = dict(PARTS.fields)
        if gpt2:
            fields |= {"tokenizer.ggml.model": packed("gpt2"), "tokenizer.ggml.pre": packed("qwen2")}
            fields["tokenizer.ggml.merges"] = packed(["a b"])
        path.write_bytes(replace(PARTS, fields=fields | {name: packed(value)}).whole())
        for read in (
            gguf_config,
            gguf_tokenizer,
            special_tokens,
            lambda file: load_model(file.path, torch.float32, max_position=8),
        ):
            assert str(path) in error_in(read, path)

    check()


def test_bytes_changed_anywhere_end_in_an_error_or_a_model(tmp_path: Path) -> None:
    """Of any header: put in, left out, put in another's place."""
    header, path = PARTS.header(), tmp_path / "a.gguf"
    data = PARTS.whole()[len(header) :]

    @fuzzed(150)
    @given(
        place=st.integers(4, len(header)), cut=st.integers(0, 16), new=st.binary(max_size=16),
        fill=st.sampled_from((b"", b"\0", b"\xff")),
    )  # fmt: skip
    def check(place: int, cut: int, new: bytes, fill: bytes) -> None:
        path.write_bytes(header[:place] + (new + fill * cut)[: max(cut, len(new))] + header[place + cut :] + data)
        for read in (gguf_config, gguf_tokenizer, lambda file: load_model(file.path, torch.float32, max_position=8)):
            assert str(path) in error_in(read, path)

    check()


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_that_are_no_numbers_are_named(name: str, outcome: Outcome) -> None:
    sizes, number, data = PARTS.data[name]
    kind = KINDS(number).name
    size = BLOCKS[kind][1]
    values = (255, 254, 253) if kind == "MXFP4" else (math.nan, math.inf, -math.inf)

    @fuzzed(6)
    @given(
        block=st.integers(0, len(data) // size - 1),
        start=st.sampled_from(HALVES[kind] or (0,)),
        value=st.sampled_from(values),
    )
    def check(block: int, start: int, value: float) -> None:
        wrong = struct.pack("<B" if kind == "MXFP4" else "<e", value)
        place = block * size + start
        changed = data[:place] + wrong + data[place + len(wrong) :]
        error = error_of(outcome, replace(PARTS, data=PARTS.data | {name: (sizes, number, changed)}).whole())
        assert f"{kind}: expected finite scales in each of {len(data) // size} blocks, found 1 that are NaN" in error

    check()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_has_finite_numbers_unless_its_scales_are_named(kind: str) -> None:
    """Whatever its bytes are: so no other place in a block is a scale that went unseen."""
    size = BLOCKS[kind][1]

    @fuzzed(30)
    @given(raw=st.binary(min_size=size, max_size=size))
    def check(raw: bytes) -> None:
        block = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None]
        finite = bool(decode_blocks(block, kind).isfinite().all())
        try:
            check_blocks(block, kind)
        except ValueError:
            return
        assert finite

    check()


def test_floats_that_are_no_numbers_are_named(outcome: Outcome) -> None:
    for name, form in (("blk.0.ffn_up.weight", "<e"), ("blk.0.attn_norm.weight", "<f")):
        sizes, kind, data = PARTS.data[name]
        wrong = struct.pack(form, math.nan)
        changed = PARTS.data | {name: (sizes, kind, data[:-8] + wrong + data[len(wrong) - 8 :])}
        assert "expected finite numbers, found nan" in error_of(outcome, replace(PARTS, data=changed).whole())


def test_one_of_several_files_of_a_model_says_how_to_join_them(outcome: Outcome) -> None:
    fields = PARTS.fields | {"split.count": packed(3, kind=2)}
    error = error_of(outcome, replace(PARTS, fields=fields).whole())
    assert "split.count: expected a whole model in one file, found one of 3 parts: join them with" in error
    assert outcome(replace(PARTS, fields=PARTS.fields | {"split.count": packed(0, kind=2)}).whole()) is None


def test_bytes_after_the_last_tensor_are_an_error(outcome: Outcome) -> None:
    assert "to be that of the file, which has" in error_of(outcome, PARTS.whole() + b"\0" * 32)


@pytest.mark.parametrize(("kind", "name"), [(16, "IQ2_XXS"), (34, "TQ1_0"), (40, "NVFP4"), (99, "kind 99")])
def test_a_kind_that_is_not_read_is_named(kind: int, name: str, outcome: Outcome) -> None:
    infos = {"blk.0.ffn_up.weight": ((32, 64), kind, offset_of("blk.0.ffn_up.weight"))}
    error = error_of(outcome, replace(PARTS, infos=infos).whole())
    assert "expected F32, F16, BF16, Q4_0" in error
    assert f"MXFP4, found {name}: take a file of the model in one of these" in error


def test_a_tokenizer_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    gpt2 = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    for changes, message in (
        ({"tokenizer.ggml.scores": [0.0] * 7 + [math.nan]}, "scores: expected finite numbers, found nan"),
        ({"tokenizer.ggml.tokens": ["a"] * 8}, "tokens: expected each token once, found 'a'"),
        ({"tokenizer.ggml.tokens": ["a", "b" * 4097]}, "tokens: expected tokens of at most 4,096 characters, found 'b"),
        (gpt2 | {"tokenizer.ggml.merges": ["a b", "a q"]}, "merges: expected two tokens with a space, .*, found 'a q'"),
        (gpt2 | {"tokenizer.ggml.merges": ["b a"]}, "merges: expected two tokens with a space, .*, found 'b a'"),
        (gpt2 | {"tokenizer.ggml.merges": ["ab"]}, "merges: expected two tokens with a space, .*, found 'ab'"),
    ):
        fields = PARTS.fields | {name: packed(value) for name, value in changes.items()}
        path.write_bytes(replace(PARTS, fields=fields).whole())
        with pytest.raises(ConfigError, match=rf"a\.gguf: tokenizer\.ggml\.{message}"):
            gguf_tokenizer(GgufFile(path))


def test_an_empty_token_has_the_name_that_llama_cpp_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", ""]
    path.write_bytes(replace(PARTS, fields=PARTS.fields | {"tokenizer.ggml.tokens": packed(tokens)}).whole())
    assert gguf_tokenizer(GgufFile(path)).id_to_token(7) == "[EMPTY_7]"
