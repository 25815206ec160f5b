"""What an `LLM` of a GGUF file needs for texts: its tokenizer, and its chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from reference_impl.features.chat.templates import ChatTemplates
from reference_impl.models.gguf_file import GgufFile
from reference_impl.models.gguf_tokenizer import gguf_tokenizer, special_tokens


def take_texts(path: Path, templates: ChatTemplates) -> Tokenizer:
    """Returns the file's tokenizer, and puts its chat template, if it has one, into templates."""
    file = GgufFile(path)
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        templates.put(template, f"{path}, tokenizer.chat_template", special_tokens(file))
    return gguf_tokenizer(file)
