"""The classes of `transformers` that take a vocabulary, merges and post-processor from tokenizer.json, and how text is
cut and decoded from their own source: LlamaTokenizer and others, as in transformers 5.23 (models/*/tokenization_*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from reference_impl.models.tokenizer_classes import Fields

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"


class TokenizerClass(NamedTuple):
    """special: the special tokens that the class names where tokenizer_config.json does not have the field.
    rebuild: sets how text is cut and decoded. post_processor: "file", "none", or "bos"."""

    special: Mapping[str, str | None]
    rebuild: Callable[[Tokenizer, Fields], None]
    post_processor: str = "file"
    adds_all_special: bool = False  # once more, which replaces flags that a file gives them


def rebuilt(tokenizer: Tokenizer, kind: TokenizerClass, config: Fields) -> Tokenizer:
    """A tokenizer of the class: without added tokens, which `transformers` adds by its lists. One whose model is not
    BPE, which these classes are, is returned as it is."""
    if not isinstance(tokenizer.model, models.BPE):
        return tokenizer
    made = Tokenizer(tokenizer.model)
    if kind.post_processor == "file" and tokenizer.post_processor is not None:
        made.post_processor = tokenizer.post_processor
    made.model.ignore_merges = made.model.byte_fallback = made.model.fuse_unk = False
    made.model.dropout = made.model.unk_token = None
    kind.rebuild(made, config)
    return made


def _in_bytes(decoder: list[Any]) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *decoder])


def _llama(made: Tokenizer, config: Fields) -> None:
    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    made.model.fuse_unk = made.model.byte_fallback = True
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = _in_bytes([decoders.Strip(" ", 1, 0)] if prefix else [])


def _code_llama(made: Tokenizer, config: Fields) -> None:
    prefix = config.get("add_prefix_space")
    scheme = "first" if prefix is None or prefix else "never"
    made.model.fuse_unk = made.model.byte_fallback = True
    made.model.unk_token = _unknown(config, "<unk>")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = _in_bytes([decoders.Strip(" ", 1, 0)])


def _gemma(made: Tokenizer, config: Fields) -> None:
    made.model.fuse_unk = made.model.byte_fallback = True
    made.model.unk_token = _unknown(config, "<unk>")
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = _in_bytes([])


def _unknown(config: Fields, default: str) -> str:
    """The text of the unknown token; that of None is "None", as in `transformers`."""
    found = config.get("unk_token", default)
    return str(found["content"] if isinstance(found, Mapping) and "content" in found else found)


def _qwen2(made: Tokenizer, config: Fields) -> None:
    made.normalizer = normalizers.NFC()
    space = bool(config.get("add_prefix_space"))
    cut = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(space, use_regex=False)])
    made.decoder = decoders.ByteLevel()


def _gpt2(made: Tokenizer, config: Fields) -> None:
    made.pre_tokenizer = pre_tokenizers.ByteLevel(bool(config.get("add_prefix_space")))
    made.decoder = decoders.ByteLevel()


def _gpt_neox(made: Tokenizer, config: Fields) -> None:
    _gpt2(made, config)
    made.normalizer = normalizers.NFC()


_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_INFILL = {
    "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>", "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}  # fmt: skip
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
CLASSES = {
    "LlamaTokenizer": TokenizerClass(_LLAMA, _llama),
    "CodeLlamaTokenizer": TokenizerClass(_LLAMA | _INFILL, _code_llama, "bos"),
    "GemmaTokenizer": TokenizerClass(
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _gemma,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}, _qwen2, adds_all_special=True
    ),
    "GPT2Tokenizer": TokenizerClass(_GPT2 | {"pad_token": None}, _gpt2),
    "GPTNeoXTokenizer": TokenizerClass(_GPT2 | {"pad_token": "<|padding|>"}, _gpt_neox, "none"),
}
