"""A folder's tokenizer is `transformers`' one: of all its files, and without what cuts or pads a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer

from reference_impl.cli.quantizing import _tokens as calibration_of
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


def test_nor_are_they_calibrations(tmp_path: Path) -> None:
    """Of `inferlab quantize`: the text would be 16 tokens, and so too short."""
    made = SHAPES["byte-level"]()
    made.enable_truncation(16)
    (tmp_path / "text").write_text("hello " * 200)
    assert calibration_of(folder(tmp_path, made), tmp_path / "text", 2, 64).shape == (2, 64)


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


SPECIAL = ("<|im_start|>", "<|im_end|>")
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # tokenizer_config.json, special_tokens_map.json
    "a name": ({"eos_token": "<|im_end|>", "pad_token": "<extra>"}, {}),
    "a name of its own": ({"image_token": "<tool>", "eos_token": None}, {}),
    "an object": ({"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "rstrip": True}}, {}),
    "one that says more": ({"eos_token": {"__type": "AddedToken", "content": "<tool>", "special": True}}, {}),
    "two names": ({"bos_token": "<tool>", "eos_token": {"__type": "AddedToken", "content": "<tool>", "rstrip": True},
                   "x_token": "<tool>"}, {}),
    "a list": ({"additional_special_tokens": [*SPECIAL], "pad_token": "<tool>"}, {}),
    "a list under the newer name": ({"extra_special_tokens": [*SPECIAL], "additional_special_tokens": ["<tool>"]}, {}),
    "names in the list": ({"extra_special_tokens": {"a_token": "<tool>"}, "additional_special_tokens": [*SPECIAL]}, {}),
    "names of the model's own": ({"model_specific_special_tokens": {"a_token": "<tool>", "b_token": "<|im_end|>"}}, {}),
    "which count alone": ({"model_specific_special_tokens": {"a_token": "<tool>"}, "b_token": "<|im_end|>"}, {}),
    "special_tokens_map.json": ({}, {"eos_token": "<|im_end|>", "tool_token": "<tool>"}),
    "its objects": ({}, {"eos_token": {"content": "<|im_end|>", "lstrip": True}, "bos_token": {"content": "<tool>"}}),
    "its list": ({}, {"additional_special_tokens": [*SPECIAL]}),
    "both lists": ({"extra_special_tokens": ["<tool>"]}, {"extra_special_tokens": [{"content": "<|im_end|>"}]}),
    "which goes first": ({"eos_token": "<tool>"}, {"eos_token": "<|im_end|>"}),
    "which is not read": ({"eos_token": "<tool>", "added_tokens_decoder": {}}, {"eos_token": "<|im_end|>"}),
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["new", "of the vocabulary"])
@pytest.mark.parametrize("shape", ["byte-level", "byte fallback"])
@pytest.mark.parametrize("case", NAMED)
def test_special_tokens_that_only_another_file_names_are_tokens(
    case: str, shape: str, known: bool, tmp_path: Path
) -> None:
    config, further = NAMED[case]
    made = SHAPES[shape]()
    if known:
        raw = json.loads(made.to_str())
        vocabulary = raw["model"]["vocab"]
        vocabulary |= {name: len(vocabulary) + at for at, name in enumerate(("<tool>", *SPECIAL, "<extra>"))}
        made = Tokenizer.from_str(json.dumps(raw))
    place = folder(tmp_path, made, config, **({"special_tokens_map": further} if further else {}))
    found = assert_same_as_transformers(place)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    assert found.templates.special_tokens == theirs.special_tokens_map


def test_flags_of_the_configuration_count(tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    size = made.get_vocab_size()
    made.add_tokens([AddedToken("<|im_end|>")])
    assert_same_as_transformers(folder(tmp_path, made, {"added_tokens_decoder": added(**{"<|im_end|>": size})}))


@pytest.mark.parametrize(
    "listed", [{}, {"added_tokens_decoder": {}}, {"added_tokens_decoder": added(**{"<tool>": 300})}]
)
def test_a_name_makes_a_listed_token_special(listed: Any, tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    made.add_tokens([AddedToken("<tool>", rstrip=True)])
    assert_same_as_transformers(folder(tmp_path, made, {"eos_token": "<tool>"} | listed))


def test_special_tokens_are_split_where_the_configuration_says_it(tmp_path: Path) -> None:
    found = assert_same_as_transformers(
        folder(tmp_path, SHAPES["byte-level"](), {"split_special_tokens": True, "eos_token": "<|im_end|>"})
    )
    assert found.tokenizer.token_to_id("<|im_end|>") not in found.encode("<|im_end|>")


@pytest.mark.parametrize("config", [{}, {"pad_token": "<tool>"}, {"pad_token": None}])
def test_the_padding_of_the_file_names_a_token_also_for_chat_templates(config: Any, tmp_path: Path) -> None:
    made = SHAPES["byte-level"]()
    made.enable_padding(pad_token="<extra>")
    template = {"chat_template": "{{ pad_token }}|{{ messages[0].content }}"}
    place = folder(tmp_path, made, config | template)
    found = assert_same_as_transformers(place)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    asked = [{"role": "user", "content": "x"}]
    assert found.chat_text(asked) == theirs.apply_chat_template(asked, tokenize=False)


OBJECT = {"__type": "AddedToken", "content": "<tool>", "rstrip": True}
TWICE: dict[str, tuple[list[AddedToken], dict[str, Any], dict[str, Any]]] = {
    # tokens of tokenizer.json, tokenizer_config.json, added_tokens.json
    "an object of the list is not compared": ([], {"extra_special_tokens": [OBJECT]}, {"<tool>": 300}),
    "a text is": ([], {"extra_special_tokens": ["<tool>"]}, {"<tool>": 300}),
    "a named object is not": ([], {"sep_token": OBJECT}, {"<tool>": 300}),
    "the tokenizer's flags": ([AddedToken("<tool>", lstrip=True)], {"extra_special_tokens": [OBJECT]}, {}),
    "the configuration's": ([AddedToken("<tool>", lstrip=True)],
                            {"added_tokens_decoder": {"300": {"content": "<tool>", "rstrip": True}}}, {}),
    "of two ids": ([], {"added_tokens_decoder": {"300": OBJECT | {"lstrip": True}, "900": {"content": "<tool>"}}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TWICE)
def test_of_a_token_that_is_named_twice_transformers_flags_count(case: str, tmp_path: Path) -> None:
    tokens, config, listed = TWICE[case]
    made = SHAPES["byte-level"]()
    assert made.get_vocab_size() == 300
    made.add_tokens(tokens)
    listed_in = {"added_tokens": listed} if listed else {}
    assert_same_as_transformers(folder(tmp_path, made, json.loads(json.dumps(config)), **listed_in))


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("wrong", [{"eos_token": 5}, {"pad_token": {"content": 5}}, {"additional_special_tokens": [5]},
                                   {"extra_special_tokens": "<tool>"}])  # fmt: skip
def test_what_is_no_special_token_is_named(name: str, wrong: Any, tmp_path: Path) -> None:
    place = folder(tmp_path, SHAPES["byte-level"]())
    (place / f"{name}.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=rf"{name}.json.*_tokens?: expected"):
        ChatEncoder(place)


@pytest.mark.parametrize("wrong", [[], {"x": {"content": "a"}}, {"5": {}}, {"5": {"content": 3}}, {"5": "a"}])
def test_what_is_no_list_of_added_tokens_is_named(wrong: Any, tmp_path: Path) -> None:
    place = folder(tmp_path, SHAPES["byte-level"](), {"added_tokens_decoder": wrong})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: added_tokens_decoder: expected"):
        ChatEncoder(place)
