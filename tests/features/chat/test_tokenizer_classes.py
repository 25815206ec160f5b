"""Where a folder names a class of `transformers` that cuts text by its own rules, its tokens are that class's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer

from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.models.config_json import read_model_config
from tests.tokenizer_shapes import SHAPES

TEXTS = (
    "hello", " hello", "  hello", "</s>hello</s> hello", "hello <tool> x<tool>x", "e\u0301 日本 😀", "", " ",
    "hello\n\nx  ☃", "▁hello ▁",
)  # fmt: skip
NAMES = ("<tool>", "</s>", "<s>", "<unk>", "<|endoftext|>", "hello", " x", "<pad>", "▁<PRE>")
CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizerFast", "GemmaTokenizerFast", "Qwen2Tokenizer",
    "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast", "NoSuchTokenizer", None,
)  # fmt: skip
TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "olmo2",
         "phi3", "stablelm")  # fmt: skip


def folder(place: Path, made: Tokenizer, config: dict[str, Any], model_type: str = "llama") -> Path:
    place.mkdir(exist_ok=True)
    made.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    return place


def assert_same_as_transformers(place: Path) -> None:
    expected, found = AutoTokenizer.from_pretrained(place), ChatEncoder(place)
    assert found.tokenizer is not None
    for text in TEXTS:
        ids = expected(text).input_ids
        assert found.encode(text) == ids
        for skip in (False, True):
            whole = expected.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert found.tokenizer.decode(ids, skip_special_tokens=skip) == whole
    assert found.templates.special_tokens == expected.special_tokens_map


def with_bos(shape: str) -> Tokenizer:
    made = SHAPES[shape]()
    raw = json.loads(made.to_str())  # all have an unknown token, which some classes need
    vocabulary = raw["model"]["vocab"]
    for name in ("<unk>", "<s>"):
        vocabulary.setdefault(name, len(vocabulary))
    made = Tokenizer.from_str(json.dumps(raw))
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", vocabulary["<s>"])])
    return made


@pytest.mark.parametrize("prefix", [True, False, None, "left out"])
@pytest.mark.parametrize("legacy", [True, False, None, "left out"])
def test_a_llama_puts_spaces_where_its_class_does(legacy: Any, prefix: Any, tmp_path: Path) -> None:
    config = {"legacy": legacy, "add_prefix_space": prefix, "tokenizer_class": "LlamaTokenizerFast"}
    config = {name: value for name, value in config.items() if value != "left out"}
    assert_same_as_transformers(folder(tmp_path, with_bos("byte fallback"), config))


@pytest.mark.parametrize("ends", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("named", ["LlamaTokenizer", "CodeLlamaTokenizer", "GPTNeoXTokenizer", "GemmaTokenizer"])
def test_a_text_begins_and_ends_as_the_class_has_it(named: str, ends: dict[str, bool], tmp_path: Path) -> None:
    assert_same_as_transformers(folder(tmp_path, with_bos("byte fallback"), {"tokenizer_class": named, **ends}))


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("shape", ["byte-level", "byte fallback"])
def test_the_class_is_the_one_that_transformers_chooses(shape: str, model_type: str, tmp_path: Path) -> None:
    for named in ("LlamaTokenizerFast", "GPT2Tokenizer", "GemmaTokenizer", None):
        place = tmp_path / str(named)
        config = {} if named is None else {"tokenizer_class": named}
        assert_same_as_transformers(folder(place, with_bos(shape), config, model_type))


def test_drawn_folders_give_the_ids_of_transformers(tmp_path: Path) -> None:
    for seed in range(20):
        assert_same_as_transformers(drawn(random.Random(seed), tmp_path / str(seed)))


def drawn(draw: random.Random, place: Path) -> Path:
    def flags(name: str) -> dict[str, Any]:
        kinds = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return {"content": name} | {kind: draw.random() < 0.4 for kind in kinds}

    made = with_bos(draw.choice(["byte-level", "byte fallback", "byte fallback, no prefix"]))
    made.add_tokens([AddedToken(**flags(name)) for name in draw.sample(NAMES, draw.randrange(3))])
    if draw.random() < 0.3:
        made.enable_padding(pad_token=draw.choice(NAMES))
    config: dict[str, Any] = {"tokenizer_class": draw.choice(CLASSES[:-1]), "legacy": draw.random() < 0.5}
    for name in ("bos_token", "eos_token", "pad_token", "tool_token"):
        if draw.random() < 0.3:
            config[name] = draw.choice([draw.choice(NAMES), {"__type": "AddedToken", **flags(draw.choice(NAMES))}])
    if draw.random() < 0.5:  # with other flags than tokenizer.json has
        own = {str(number): flags(token.content) for number, token in made.get_added_tokens_decoder().items()}
        config["added_tokens_decoder"] = own | {str(made.get_vocab_size()): flags("<new>")}
    return folder(place, made, config, draw.choice(TYPES))


def test_an_end_that_only_the_class_names_ends_an_answer(tmp_path: Path) -> None:
    place = folder(tmp_path, with_bos("byte fallback"), {"tokenizer_class": "LlamaTokenizerFast"})
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300, "eos_token_id": None,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(fields))
    assert read_model_config(place).eos_token_ids == (2,)
