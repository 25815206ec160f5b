"""GGUF files that the package gguf writes: blocks against its own decoding, logits against what transformers reads of
the same file, and errors for files that are cut off or of another kind."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model
from reference_impl.assembly.stored_weights import paths_of
from reference_impl.features.chat.gguf import take_texts
from reference_impl.features.chat.templates import ChatTemplates
from reference_impl.models.gguf_file import GgufFile
from reference_impl.models.gguf_model import gguf_config
from reference_impl.models.gguf_tokenizer import gguf_tokenizer
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.converted import PER_PRODUCT
from reference_impl.models.quantization.gguf_blocks import BLOCKS, HALVES, codes_of, decode_blocks
from reference_impl.models.quantization.scheme import decode
from reference_impl.models.quantization.stored import Stored
from reference_impl.models.quantization.tensors import fitted_of, tensors_of
from tests.models.test_parity import IDS, worst
from tests.quantization.conftest import MakeFolder, make_folder  # noqa: F401

FLOAT32 = torch.float32
KINDS = gguf.GGMLQuantizationType
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def theirs(name: str) -> str:
    part, _, word = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if part in top:
        return f"{top[part]}.{word}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{word}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def some_blocks(kind: str, rows: int, numbers: int, seed: int) -> np.ndarray:
    """Random bytes, but for the float16 numbers in them, which are small."""
    each, size = BLOCKS[kind]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows, numbers // each, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = draw.integers(118, 123, blocks.shape[:2])
    factor = {"Q8_0": 2e-3, "Q6_K": 5e-5, "Q2_K": 2e-3, "Q3_K": 5e-4, "Q4_K": 3e-4, "Q5_K": 2e-4, "IQ4_NL": 1e-3,
              "IQ4_XS": 5e-5}.get(kind, 2e-2)  # fmt: skip
    for start in HALVES[kind]:
        small = draw.uniform(0.2, 1, blocks.shape[:2]).astype(np.float16) * np.float16(factor)
        blocks[..., start : start + 2] = small.astype(np.float16).view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_decoded_as_gguf_decodes_them(kind: str) -> None:
    raw = some_blocks(kind, 6, 1024, 1)
    expected = gguf.quants.dequantize(raw, KINDS[kind])
    assert torch.equal(decode_blocks(torch.from_numpy(raw), kind), torch.from_numpy(expected))
    assert (BLOCKS[kind][0], BLOCKS[kind][1]) == gguf.GGML_QUANT_SIZES[KINDS[kind]]


def test_a_block_of_q4_0_worked_out_by_hand() -> None:
    """Scale 0.5; byte i has number i in its low 4 bits and number 16 + i in its high ones, 8 more than their codes."""
    raw = struct.pack("<e16B", 0.5, *(i | (15 - i) << 4 for i in range(16)))
    found = decode_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None], "Q4_0")[0]
    assert found.tolist() == [(i - 8) / 2 for i in range(16)] + [(7 - i) / 2 for i in range(16)]


def test_a_block_of_q4_k_worked_out_by_hand() -> None:
    """d 1/2, m 1/4. Factors of scale 1 to 8 and of offset 0 to 7 fit in 4 bits: the first four lie in bytes 0 to 3 and
    4 to 7, the others in the low and high bits of bytes 8 to 11. Each code is 3 in low bits and 5 in high ones."""
    sixes = [1, 2, 3, 4, 0, 1, 2, 3, *(low | high << 4 for low, high in zip((5, 6, 7, 8), (4, 5, 6, 7), strict=True))]
    raw = struct.pack("<ee12B128B", 0.5, 0.25, *sixes, *([0x53] * 128))
    found = decode_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None], "Q4_K")[0]
    for sub in range(8):
        expected = 0.5 * (sub + 1) * (3 if sub % 2 == 0 else 5) - 0.25 * sub
        assert found[32 * sub : 32 * sub + 32].tolist() == [expected] * 32


def test_a_block_of_q2_k_worked_out_by_hand() -> None:
    """d 1/2, m 1/4. The k-th 16 numbers have the factor of scale k and that of offset 15 - k. 0xE4 is 3, 2, 1, 0 from
    its high bits down: of 256 numbers the first 32 have the code 0, the next 32 have 1, ..., anew after four."""
    raw = struct.pack("<16B64Bee", *(k | (15 - k) << 4 for k in range(16)), *([0xE4] * 64), 0.5, 0.25)
    found = decode_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None], "Q2_K")[0]
    for k in range(16):
        expected = 0.5 * k * (k // 2 % 4) - 0.25 * (15 - k)
        assert found[16 * k : 16 * k + 16].tolist() == [expected] * 16


def test_a_block_of_q3_k_worked_out_by_hand() -> None:
    """d 1/2. The k-th 16 numbers have the factor k - 8, stored as k + 24. Low bits of codes as in Q2_K's block;
    of every second 32 numbers the third bit is set; 4 less than that is the number."""
    factors = [k + 24 for k in range(16)]
    low = [factors[k] & 15 | (factors[k + 8] & 15) << 4 for k in range(8)]
    high = [sum((factors[4 * j + k] >> 4) << 2 * j for j in range(4)) for k in range(4)]
    raw = struct.pack("<32B64B12Be", *([0b10101010] * 32), *([0xE4] * 64), *low, *high, 0.5)
    found = decode_blocks(torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None], "Q3_K")[0]
    for k in range(16):
        code = k // 2 % 4 + 4 * (k // 2 % 2) - 4
        assert found[16 * k : 16 * k + 16].tolist() == [0.5 * (k - 8) * code] * 16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
def test_three_kinds_are_a_scheme_and_go_into_compressed_tensors(kind: str) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(weight, KINDS[kind]))
    coded = codes_of(raw, kind)
    codes, scheme, fitted = coded.codes, coded.scheme, coded.fitted
    back, again = fitted_of(tensors_of(codes, scheme, fitted), scheme, 64)
    assert torch.equal(decode(back, scheme, again), decode_blocks(raw, kind))


Make = Callable[..., tuple[Path, dict[str, Tensor]]]


@pytest.fixture
def make_gguf(make_folder: MakeFolder, tmp_path: Path) -> Make:  # noqa: F811
    """make(architecture, {word of a name: kind}, metadata) -> (file, the weights of it by Hugging Face's names)."""

    def make(architecture: str, kinds: dict[str, str], extra: dict[str, Any] | None = None) -> Any:
        family = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
        config = {
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "head_dim": 64,
            "vocab_size": 97,
            "max_position_embeddings": 256,
            "tie_word_embeddings": architecture != "llama",
        }
        tensors = load_file(make_folder(architecture=family, **config) / "model.safetensors")
        writer, weights = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture), {}
        writer.add_embedding_length(256)
        writer.add_block_count(1)
        writer.add_feed_forward_length(256)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_key_length(64)
        writer.add_value_length(64)
        writer.add_rope_dimension_count(64)
        writer.add_context_length(256)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([chr(192 + i) for i in range(97)])
        for name, value in (extra or {}).items():
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
        for seed, (name, tensor) in enumerate(tensors.items()):
            kind = next((kinds[word] for word in kinds if word in name), kinds.get("", "F16"))
            kind = "F32" if tensor.dim() == 1 else kind
            data, heads = tensor.numpy(), {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
            if kind in BLOCKS:
                data = some_blocks(kind, *tensor.shape, seed)
                weights[name] = torch.from_numpy(gguf.quants.dequantize(data, KINDS[kind]))
            else:
                data = data if kind == "F32" else gguf.quants.quantize(data, KINDS[kind])
                weights[name] = tensor if kind == "F32" else torch.from_numpy(gguf.quants.dequantize(data, KINDS[kind]))
            if architecture == "llama" and heads:
                data = permute(data, heads)
            writer.add_tensor(theirs(name), data, raw_dtype=KINDS[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return writer.path if hasattr(writer, "path") else tmp_path / f"{architecture}.gguf", weights

    return make


MIXED = {"q_proj": "Q4_K", "v_proj": "Q6_K", "k_proj": "Q8_0", "o_proj": "Q5_K", "gate": "Q4_0", "up": "Q4_0"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_decoded_weights(
    architecture: str,
    make_gguf: Make,
    our_logits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With parts of one layer of different kinds, as files named Q4_K_M have them: decoded once, or, where memory has
    no room for that, for each product."""
    path, weights = make_gguf(architecture, MIXED | {"down": "BF16", "embed": "Q8_0", "lm_head": "Q6_K"})
    model = load_model(path, FLOAT32)
    folder = tmp_path / "model"
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = our_logits(load_model(folder, FLOAT32), IDS)[0]
    assert worst(our_logits(model, IDS)[0], expected) <= 1e-5
    assert set(paths_of(model)) == {"decoded once"}
    decoded = "reference_impl.assembly.stored_weights.decoded_bytes"
    monkeypatch.setattr(decoded, lambda config, dtype: 1 << 60)
    model = load_model(path, FLOAT32)
    assert set(paths_of(model)) == {PER_PRODUCT}
    assert worst(our_logits(model, IDS)[0], expected) <= 1e-5
    methods = {linear.name.rpartition(".")[2]: linear.method for linear in model.linears()}
    assert [isinstance(methods[name], Stored) for name in ("qkv_proj", "gate_up_proj", "down_proj")] == [
        True, True, False,
    ]  # fmt: skip
    qkv = next(linear for linear in model.linears() if linear.name.endswith("qkv_proj"))
    bits = 256 * (256 * 4.5 + 128 * 8.5 + 128 * 6.5625)  # q: 144 bytes for 256 numbers; k: 34 for 32; v: 210 for 256
    assert 8 * qkv.weight_bytes() - (32 * 512 if architecture == "qwen2" else 0) == bits


def test_transformers_reads_the_same_logits_of_a_llama(
    make_gguf: Make, our_logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It undoes llama.cpp's order of rows by itself."""
    from transformers import AutoModelForCausalLM, modeling_utils

    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)  # asked for, and not used here
    path, _ = make_gguf("llama", {"": "F16", "mlp": "Q8_0"})
    other = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=FLOAT32).eval()
    with torch.no_grad():
        expected = other(torch.tensor([IDS])).logits[0]
    assert worst(our_logits(load_model(path, FLOAT32), IDS)[0], expected) <= 1e-4


def test_the_course_model_writes_the_same_text_from_gguf(tmp_path: Path) -> None:
    """Qwen3, all matrices in F16 (bf16's numbers here are in its range), its tokenizer whole in the file."""
    folder = course_model("target")
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    writer = gguf.GGUFWriter(tmp_path / "course.gguf", "qwen3")
    for add, value in [
        (writer.add_embedding_length, 256), (writer.add_block_count, 8), (writer.add_feed_forward_length, 768),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2), (writer.add_key_length, 64),
        (writer.add_context_length, 2048), (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4),
        (writer.add_eos_token_id, 2),
    ]:  # fmt: skip
        add(value)
    writer.add_string("tokenizer.huggingface.json", (folder / "tokenizer.json").read_text())
    writer.add_string("tokenizer.chat_template", "{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        writer.add_tensor(theirs(name), tensor.numpy(), raw_dtype=KINDS.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompt, sampling = "def open_file(file):\n", SamplingParams(max_tokens=16, temperature=0)
    found = LLM(tmp_path / "course.gguf", device="cpu", num_blocks=16)
    expected = LLM(folder, dtype="float32", device="cpu", num_blocks=16).generate(prompt, sampling)[0]
    assert found.generate(prompt, sampling)[0].text == expected.text
    assert found.chat_text([{"role": "user", "content": "Hello"}]) == "Hello"
    assert gguf_config(GgufFile(tmp_path / "course.gguf")).eos_token_ids == (2, 0)  # <|endoftext|> by its text


def tokenizer_file(tmp_path: Path, **fields: Any) -> GgufFile:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for name, value in fields.items():
        writer.add_key_value(f"tokenizer.ggml.{name}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(tmp_path / "t.gguf")


def test_a_tokenizer_of_bytes_is_the_folder_s(tmp_path: Path) -> None:
    """The course's vocabulary and merges with Qwen2's pattern, beside a tokenizer made of the same by hand."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    made = Tokenizer.from_file(str(course_model("target") / "tokenizer.json"))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # of Qwen2's own tokenizer.json
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    stored = json.loads(made.to_str())["model"]
    tokens = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    file = tokenizer_file(
        tmp_path, model="gpt2", pre="qwen2", tokens=tokens, merges=[" ".join(pair) for pair in stored["merges"]],
        token_type=[3 if i < 3 else 1 for i in range(len(tokens))],
    )  # fmt: skip
    found, text = gguf_tokenizer(file), "<|im_start|>def f(x1):\n    return 'it''s' + ü\t 123<|im_end|>"
    assert found.encode(text).ids == made.encode(text).ids
    odd = "we'll don'tx it'sx WE'LL\r\n\n  12345 a_b!!\n"  # whose pieces hang on each part of the pattern
    assert found.pre_tokenizer is not None
    assert found.pre_tokenizer.pre_tokenize_str(odd) == made.pre_tokenizer.pre_tokenize_str(odd)
    assert found.decode(found.encode(text).ids) == made.decode(made.encode(text).ids)


def test_a_tokenizer_of_scores_merges_the_best_pair_first(tmp_path: Path) -> None:
    """Worked out by hand: "abc" is ▁ a b c; bc has the best score, then ▁a; ü is its two bytes; <s> comes first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -2.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 7
    file = tokenizer_file(
        tmp_path, model="llama", tokens=tokens, scores=scores, token_type=types, bos_token_id=1, add_bos_token=True
    )
    found = gguf_tokenizer(file)
    encoded = found.encode("abc ü")
    assert encoded.tokens == ["<s>", "▁a", "bc", "▁", "<0xC3>", "<0xBC>"]
    assert found.decode(encoded.ids) == "abc ü"


def test_a_file_may_have_a_template_for_tools_beside_its_own(tmp_path: Path) -> None:
    """As gguf's writer puts them there for a tokenizer_config.json with a list."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["x", "y", "xy"])
    writer.add_token_merges(["x y"])
    writer.add_chat_template(
        [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    )
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    templates = ChatTemplates(None)
    take_texts(tmp_path / "t.gguf", templates)
    assert [templates.choose(None, has_tools=tools)[0] for tools in (False, True)] == ["{{ messages }}", "{{ tools }}"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "llama-bpe"}, "<a>x"),  # llama.cpp's default for it
        ({"pre": "llama-bpe", "add_bos_token": False}, "x"),
        ({"pre": "qwen2"}, "x"),
        ({"pre": "qwen2", "add_eos_token": True}, "x<b>"),  # as of Qwen3-Embedding
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True}, "<a>x<b>"),
        ({"pre": "qwen2", "add_eos_token": True, "eos_token_id": 99}, "x"),
    ],
    ids=str,
)
def test_what_a_file_puts_around_a_text_is_put_there(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    named: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2} | fields
    tokens, types = ["x", "<a>", "<b>", "y", "xy"], [1, 3, 3, 1, 1]
    made = gguf_tokenizer(
        tokenizer_file(tmp_path, model="gpt2", tokens=tokens, merges=["x y"], token_type=types, **named)
    )
    assert "".join(made.encode("x").tokens) == expected
    assert made.encode("x", add_special_tokens=False).tokens == ["x"]


def test_llama_3_s_rotary_factors_are_read(make_gguf: Make, tmp_path: Path) -> None:
    path, _ = make_gguf("llama", {})
    assert gguf_config(GgufFile(path)).rope.kind == "default"
    file = GgufFile(path)
    file.tensors["rope_freqs.weight"] = file.tensors["output_norm.weight"]  # 256 numbers, not 32
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: expected 32 positive numbers, found \[256\]"):
        gguf_config(file)
    factors = torch.linspace(1, 8, 32)
    file.raw = lambda name: factors  # type: ignore[method-assign]
    config = gguf_config(file)
    assert config.rope.short_factors == tuple(factors.tolist())
    assert config.max_position == config.rope.original_max_position == 256


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type: expected none or linear, found 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count: expected 0, or no such field.*found 8"),
    ],
)
def test_what_would_change_the_numbers_is_refused(extra: dict, message: str, make_gguf: Make) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(make_gguf("llama", {}, extra)[0])


def test_a_file_that_is_cut_off_or_of_another_kind_is_named(make_gguf: Make, tmp_path: Path) -> None:
    path, _ = make_gguf("llama", {})
    whole, bad = path.read_bytes(), tmp_path / "bad.gguf"

    def error(data: bytes) -> str:
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"bad\.gguf") as caught:
            load_model(bad)
        return str(caught.value)

    assert "expected a GGUF file, found 10 bytes" in error(whole[:10])
    assert "found b'PK" in error(b"PK\3\4" + whole[4:])
    assert "version 2 or 3 (little-endian), found 50331648" in error(whole[:4] + b"\0\0\0\3" + whole[8:])
    assert "bytes from" in error(whole[:-1000])
    assert "expected 18,446,744,073,709,551,615 entries" in error(whole[:8] + b"\xff" * 8 + whole[16:])
    with pytest.raises(CheckpointError, match="no such file; expected a model in GGUF"):
        load_model(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="expected neither quantization nor linear_method for a GGUF file"):
        load_model(path, quantization="int8")
    draw = random.Random(0)
    end = whole.index(b"blk.0")
    for _ in range(60):  # no other error than one that names the file, whatever stands in the header
        place = draw.randrange(4, end + 400)
        bad.write_bytes(whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :])
        with contextlib.suppress(ConfigError, CheckpointError):
            gguf_config(GgufFile(bad))


def test_a_tokenizer_whose_pattern_is_not_known_asks_for_the_model_s_own(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path, model="gpt2", pre="viking", tokens=["a"], merges=["a a"])
    with pytest.raises(ConfigError, match=r"found 'gpt2' with 'viking': put the tokenizer.json .* beside the file"):
        gguf_tokenizer(file)
    (tmp_path / "tokenizer.json").write_text((course_model("target") / "tokenizer.json").read_text())
    assert gguf_tokenizer(file).get_vocab_size() == 4096


@pytest.mark.parametrize("kind", [*BLOCKS, "BF16"])
def test_the_course_model_in_each_kind_has_the_logits_of_its_decoded_weights(
    kind: str, our_logits, tmp_path: Path
) -> None:
    """Two of its layers, and the embedding, which is its lm_head, too. Blocks that the package gguf rounds to are those
    of the course model's weights; of the others, which it only decodes, they are drawn."""
    folder, weights = course_model("target"), {}
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2, "dtype": "float32"}
    writer = gguf.GGUFWriter(tmp_path / "course.gguf", "qwen3")
    for add, value in [
        (writer.add_embedding_length, 256), (writer.add_block_count, 2), (writer.add_feed_forward_length, 768),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2), (writer.add_key_length, 64),
        (writer.add_context_length, 2048), (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4),
    ]:  # fmt: skip
        add(value)
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        if "layers." in name and int(name.split(".")[2]) > 1:
            continue
        own, data = KINDS[kind if tensor.dim() > 1 else "F32"], tensor.float().numpy()
        try:
            data = gguf.quants.quantize(data, own)
        except NotImplementedError:
            data = some_blocks(kind, *tensor.shape, seed)
        weights[name] = torch.from_numpy(gguf.quants.dequantize(data, own)).view(tensor.shape)
        writer.add_tensor(theirs(name), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    expected = our_logits(load_model(tmp_path / "plain", FLOAT32), IDS)[0]
    found = our_logits(load_model(tmp_path / "course.gguf", FLOAT32), IDS)[0]
    assert torch.equal(found, expected)


def test_a_tied_llama_whose_heads_are_not_a_part_of_its_width(our_logits, tmp_path: Path, make_folder) -> None:  # noqa: F811
    """Four heads of 32 numbers in a width of 256; o_proj's rows of 128 numbers are no whole block of a K kind."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 97,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
             "tie_word_embeddings": True, "rms_norm_eps": 1e-6}  # fmt: skip
    folder = make_folder(architecture="LlamaForCausalLM", **sizes)
    writer, weights = gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), {}
    for add, value in [
        (writer.add_embedding_length, 256), (writer.add_block_count, 1), (writer.add_feed_forward_length, 256),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2), (writer.add_key_length, 32),
        (writer.add_value_length, 32), (writer.add_rope_dimension_count, 32), (writer.add_context_length, 256),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4),
    ]:  # fmt: skip
        add(value)
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        kind = "F32" if tensor.dim() == 1 else "IQ4_NL" if "o_proj" in name else "Q6_K" if "embed" in name else "IQ4_XS"
        data = tensor.numpy() if kind == "F32" else some_blocks(kind, *tensor.shape, seed)
        weights[name] = torch.from_numpy(gguf.quants.dequantize(data, KINDS[kind])).view(tensor.shape)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        writer.add_tensor(theirs(name), permute(data, heads) if heads else data, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path / "a.gguf", FLOAT32)
    assert model.lm_head is None
    assert model.config.head_dim == 32
    assert torch.equal(our_logits(model, IDS)[0], our_logits(load_model(folder, FLOAT32), IDS)[0])
