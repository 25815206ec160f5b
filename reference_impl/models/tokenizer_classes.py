"""Which class of `transformers` a folder's tokenizer gets, as `AutoTokenizer` of transformers 5.23 chooses it
(models/auto/tokenization_auto.py).

Some classes take a vocabulary, merges and post-processor from tokenizer.json, and how text is cut and decoded from
their own source: tokenizer_rebuilt.py. For most published folders both are the same; they differ where tokenizer.json
was written by an older version, as Llama 2's with `Prepend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = "TokenizersBackend"  # tokenizer.json as it is
_OF_TYPE = {  # what transformers registers for the families that are served; for "llama" nothing
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("mistral", "mixtral", "mistral3", "olmo2", "phi3", "stablelm"), _PLAIN),
}
_NOT_TRUSTED = ("qwen2", "phi3")  # types whose folders often name a wrong class
_REBUILT = (
    "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer",
)  # fmt: skip

Fields = Mapping[str, Any]


def class_named(config: Fields, model: Fields, text: str) -> str | None:
    """The name of the class that a folder gets, or None where tokenizer.json is taken as it is.

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
    return named if named in _REBUILT else None
