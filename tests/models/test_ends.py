"""What ends an answer: of a folder what vLLM ends it with, of a GGUF file what llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.models.config_json import read_model_config
from reference_impl.models.gguf_model import _ends
from reference_impl.models.gguf_tokenizer import gguf_tokenizer, special_tokens
from tests.models.test_gguf import tokenizer_file

TOKENS = ["<s>", "</x>", "a", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>"]


def gguf_file(place: Path, tokens: list[str], model: str = "gpt2", **fields: Any) -> Any:
    types = [1 if len(token) == 1 else 3 for token in tokens]
    return tokenizer_file(
        place, model=model, tokens=tokens, scores=[0.0] * len(tokens), **{"token_type": types} | fields
    )


def test_a_template_may_end_turns_with_a_token_that_the_file_does_not_name(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, TOKENS[:6], eos_token_id=1)
    assert _ends(file) == [1, 4, 5]
    assert _ends(gguf_file(tmp_path, TOKENS[:6])) == [4, 5]


def test_sentencepieces_vocabularies_have_llama_cpps_ids_where_the_file_names_none(tmp_path: Path) -> None:
    """Unknown 0, begin 1, end 2 (llama-vocab.cpp)."""
    tokens = ["<unk>", "<s>", "</x>", "a", "▁", "▁a"]
    file = gguf_file(tmp_path, tokens, "llama")
    assert _ends(file) == [2]
    assert special_tokens(file) == {"bos_token": "<s>", "eos_token": "</x>", "unk_token": "<unk>"}
    assert gguf_tokenizer(file).encode("a").ids == [1, 5]
    assert _ends(gguf_file(tmp_path, tokens, "llama", eos_token_id=3)) == [3]
    assert _ends(gguf_file(tmp_path, tokens[:2], "llama")) == [], "no token has the id"
    assert special_tokens(gguf_file(tmp_path, tokens)) == {}


@pytest.mark.parametrize(
    "end", ["<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<|eom_id|>", "<eos>", "<EOT>", "[EOT]",
            "<｜end▁of▁sentence｜>", "[e~["]
)  # fmt: skip
def test_texts_that_end_turns(end: str, tmp_path: Path) -> None:
    assert _ends(gguf_file(tmp_path, ["<s>", "a", end, "<|im_start|>"], eos_token_id=0)) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("fim_pad", "<|fim_pad|>"), ("fim_pad", "<fim_pad>"), ("fim_pad", "[PAD]"), ("fim_rep", "<|repo_name|>"),
     ("fim_rep", "<reponame>"), ("fim_sep", "<|file_sep|>")]
)  # fmt: skip
def test_what_stands_between_files_of_code_ends_an_answer(kind: str, text: str, tmp_path: Path) -> None:
    """The token whose id the file names, or else the one of this text."""
    tokens = ["a", text, "<|x|>"]
    assert _ends(gguf_file(tmp_path, tokens)) == [1]
    assert _ends(gguf_file(tmp_path, tokens, **{f"{kind}_token_id": 2})) == [2]
    assert _ends(gguf_file(tmp_path, tokens, **{f"{kind}_token_id": 3})) == [1]  # no token has it


def test_what_ends_no_turn_beside_others(tmp_path: Path) -> None:
    """gpt-oss writes several messages, each up to <|end|>."""
    assert _ends(gguf_file(tmp_path, TOKENS[6:])) == [1, 2]
    assert _ends(gguf_file(tmp_path, TOKENS[6:], eos_token_id=1, eot_token_id=0)) == [1, 2]
    assert _ends(gguf_file(tmp_path, ["<|end|>", "<|flush|>", "<|call|>"])) == [1, 2]
    assert _ends(gguf_file(tmp_path, ["</s>", "<turn|>", "<|tool_response>"])) == [1, 2]


def test_an_end_is_no_text_whatever_its_type(tmp_path: Path) -> None:
    made = gguf_tokenizer(
        gguf_file(tmp_path, ["<s>", "a", "<|im_end|>", "<|im_start|>"], "llama", token_type=[3, 1, 4, 4])
    )
    assert made.encode("a<|im_end|>", add_special_tokens=False).ids[-1] == 2
    assert made.decode([1, 2, 3]) == "a<|im_start|>"


def folder(place: Path, config: Any, generation: Any = None, tokenizer: Any = None, **others: Any) -> Path:
    course = course_model("target")
    raw = json.loads((course / "config.json").read_text())
    raw.pop("eos_token_id")
    (place / "config.json").write_text(json.dumps(raw | config))
    (place / "tokenizer.json").write_text((course / "tokenizer.json").read_text())
    for name, content in {"generation_config": generation, "tokenizer_config": tokenizer, **others}.items():
        if content is not None:
            (place / f"{name}.json").write_text(json.dumps(content))
    return place


START, END, TEXT = 1, 2, 0  # <|im_start|>, <|im_end|>, <|endoftext|>


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": TEXT}, None, {"eos_token": "<|im_end|>"}, (TEXT, END)),
        ({"eos_token_id": TEXT}, {"eos_token_id": START}, {"eos_token": "<|im_end|>"}, (START, END)),
        ({"eos_token_id": TEXT}, {"eos_token_id": [END, START]}, {"eos_token": "<|im_end|>"}, (END, START)),
        ({"eos_token_id": None}, None, {"eos_token": {"content": "<|im_end|>"}}, (END,)),
        ({"eos_token_id": TEXT}, {"eos_token_id": None}, {"eos_token": "<|im_end|>"}, (END,)),
        ({}, {}, {"eos_token": "<|im_end|>", "added_tokens_decoder": {"77": {"content": "<|im_end|>"}}}, (77,)),
        ({"eos_token_id": TEXT}, None, {"eos_token": None}, (TEXT,)),
        ({"eos_token_id": TEXT}, None, {"eos_token": "<no such token>"}, (TEXT,)),
        ({"eos_token_id": TEXT}, None, {"added_tokens_decoder": {"x": 3}, "eos_token": 5}, (TEXT,)),
        ({"eos_token_id": TEXT}, None, None, (TEXT,)),
        ({"eos_token_id": None}, None, None, (TEXT,)),  # that of Qwen2Tokenizer, which is this model_type's
    ],
)  # fmt: skip
def test_the_tokenizers_end_counts_beside_the_configurations(
    config: Any, generation: Any, tokenizer: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """As in vLLM: generation_config.json's ids or else config.json's, and the tokenizer's eos_token."""
    assert read_model_config(folder(tmp_path, config, generation, tokenizer)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("tokenizer", "others", "expected"),
    [
        ({}, {"special_tokens_map": {"eos_token": "<|im_end|>"}}, (TEXT, END)),
        (None, {"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (TEXT, END)),
        ({"eos_token": "<|im_start|>"}, {"special_tokens_map": {"eos_token": "<|im_end|>"}}, (TEXT, END)),
        ({"added_tokens_decoder": {}}, {"special_tokens_map": {"eos_token": "<|im_end|>"}}, (TEXT,)),
        ({"eos_token": "<new>"}, {"added_tokens": {"<new>": 4096}}, (TEXT, 4096)),
        ({}, {"special_tokens_map": {"eos_token": "<new>"}}, (TEXT, 4096)),
        ({"pad_token": "<pad>", "bos_token": "<begin>"}, {"special_tokens_map": {"eos_token": "<new>"}}, (TEXT, 4097)),
        ({"eos_token": "<|im_end|>"}, {"special_tokens_map": [5]}, (TEXT,)),
    ],
)  # fmt: skip
def test_the_end_may_be_named_by_any_file_of_the_tokenizer(
    tokenizer: Any, others: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """As transformers reads them; where the model has the token."""
    place = folder(tmp_path, {"eos_token_id": TEXT, "vocab_size": 4098}, None, tokenizer, **others)
    assert read_model_config(place).eos_token_ids == expected
    place = folder(tmp_path, {"eos_token_id": TEXT, "vocab_size": 4096}, None, tokenizer, **others)
    assert read_model_config(place).eos_token_ids == tuple(token for token in expected if token < 4096)


def test_a_broken_file_of_the_tokenizer_is_not_the_configurations_error(tmp_path: Path) -> None:
    place = folder(tmp_path, {"eos_token_id": TEXT}, tokenizer={"eos_token": "<|im_end|>"})
    (place / "tokenizer.json").write_text("{")
    assert read_model_config(place).eos_token_ids == (TEXT,)
    (place / "tokenizer_config.json").write_text("[")
    assert read_model_config(place).eos_token_ids == (TEXT,)
