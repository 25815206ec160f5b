"""The classes of `transformers` that take a vocabulary, merges and post-processor from tokenizer.json, and how text is
cut and decoded from their own source: LlamaTokenizer and others, as in transformers 5.23 (models/*/tokenization_*.py).

Which class a folder gets is what `AutoTokenizer` chooses (models/auto/tokenization_auto.py). For most published folders
both are the same; they differ where tokenizer.json was written by an older version, as Llama 2's with `Prepend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
_PLAIN = "TokenizersBackend"  # tokenizer.json as it is
_OF_TYPE = {  # what transformers registers for the families that are served; for "llama" nothing
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("mistral", "mixtral", "mistral3", "olmo2", "phi3", "stablelm"), _PLAIN),
}
_NOT_TRUSTED = ("qwen2", "phi3")  # types whose folders often name a wrong class

Fields = Mapping[str, Any]


class TokenizerClass(NamedTuple):
    """special: the special tokens that the class names where tokenizer_config.json does not have the field.
    rebuild: sets how text is cut and decoded. post_processor: "file", "none", or "bos"."""

    special: Mapping[str, str | None]
    rebuild: Callable[[Tokenizer, Fields], None]
    post_processor: str = "file"
    adds_all_special: bool = False  # once more, which replaces flags that a file gives them


def tokenizer_class(config: Fields, model: Fields, text: str) -> TokenizerClass | None:
    """The class that a folder gets, or None where tokenizer.json is taken as it is.

    config, model: the fields of tokenizer_config.json and config.json. text: that of tokenizer.json.
    """
    named, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    registered = _OF_TYPE.get(model_type) if isinstance(model_type, str) else None
    trusted, own_code = model_type not in _NOT_TRUSTED, "auto_map" in config
    if named == "LlamaTokenizer" and trusted and not own_code and '"ByteLevel"' in text:
        return None
    if named is None:
        named = registered
    elif registered not in (None, named) and not own_code:
        named = _PLAIN if registered == _PLAIN else named if trusted else registered
    return CLASSES.get(named or _PLAIN)


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
