"""A folder's tokenizer is `transformers`' one: of all its files, and without what cuts or pads a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from reference_impl.features.chat.prompts import ChatEncoder
from tests.tokenizer_shapes import SHAPES

TEXTS = ("hello<|im_start|>user hello<|im_end|>", "<extra> [x]<tool>", "a  <|im_end|> b", "hello " * 40)


def folder(place: Path, made: Tokenizer, config: dict[str, Any] | None = None, **others: Any) -> Path:
    place.mkdir(exist_ok=True)
    made.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    for name, content in {"tokenizer_config": config, **others}.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


def assert_same_as_transformers(place: Path) -> ChatEncoder:
    transformers = pytest.importorskip("transformers")
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    found = ChatEncoder(place)
    assert found.tokenizer is not None
    for text in TEXTS:
        ids = expected(text).input_ids
        assert found.encode(text) == ids
        for skip in (False, True):
            whole = expected.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert found.tokenizer.decode(ids, skip_special_tokens=skip) == whole
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_truncation_and_padding_of_the_file_are_not_a_prompts(shape: str, tmp_path: Path) -> None:
    made = SHAPES[shape]()
    made.enable_truncation(16)
    made.enable_padding(length=64)
    found = assert_same_as_transformers(folder(tmp_path, made))
    assert len(found.encode("hello " * 40)) > 16
    assert len(found.encode("hello")) < 16


def added(**tokens: int) -> dict[str, Any]:
    return {
        str(number): {"content": name, "lstrip": False, "rstrip": name == "<|im_end|>", "normalized": False,
                      "single_word": False, "special": name.startswith("<|")}
        for name, number in tokens.items()
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["byte-level", "byte fallback"])
def test_added_tokens_of_the_configuration_are_tokens(shape: str, tmp_path: Path) -> None:
    made = SHAPES[shape]()
    size = made.get_vocab_size()
    tokens = added(**{"<|im_end|>": size + 1, "<|im_start|>": size, "<tool>": size + 2})
    found = assert_same_as_transformers(folder(tmp_path, made, {"added_tokens_decoder": tokens}))
    assert {size, size + 1} <= {*found.encode(TEXTS[0])}
    assert size + 2 in found.encode(TEXTS[1])


def test_those_of_the_tokenizers_file_stay_as_they_are(tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    size = made.get_vocab_size()
    made.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    tokens = added(**{"<|im_start|>": size, "<|im_end|>": size + 1})
    found = assert_same_as_transformers(folder(tmp_path, made, {"added_tokens_decoder": tokens}))
    assert found.tokenizer is not None
    assert found.tokenizer.get_vocab_size() == size + 2


def test_added_tokens_of_their_own_file_are_tokens(tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    size = made.get_vocab_size()
    config = {"eos_token": "<|im_end|>"}
    others = {"added_tokens": {"<|im_end|>": size, "<tool>": size + 1}}
    found = ChatEncoder(folder(tmp_path, made, config, **others))
    assert found.tokenizer is not None
    assert found.encode("<tool><|im_end|>") == [size + 1, size]
    assert found.tokenizer.decode([size + 1, size]) == "<tool>"


def test_an_added_token_that_cannot_have_its_id_is_named(tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    size = made.get_vocab_size()
    place = folder(tmp_path, made, {"added_tokens_decoder": added(**{"<tool>": size + 7})})
    with pytest.raises(ValueError, match=rf"tokenizer_config.json: added_tokens_decoder: '<tool>'.*{size + 7}.*{size}"):
        ChatEncoder(place)


@pytest.mark.parametrize("wrong", [[], {"x": {"content": "a"}}, {"5": {}}, {"5": {"content": 3}}, {"5": "a"}])
def test_what_is_no_list_of_added_tokens_is_named(wrong: Any, tmp_path: Path) -> None:
    place = folder(tmp_path, SHAPES["byte-level"](), {"added_tokens_decoder": wrong})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: added_tokens_decoder: expected"):
        ChatEncoder(place)
