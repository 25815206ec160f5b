"""What an `LLM` of a GGUF file needs for texts: its tokenizer, and its chat templates."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from reference_impl.features.chat.templates import ChatTemplates
from reference_impl.models.gguf_file import GgufFile
from reference_impl.models.gguf_tokenizer import gguf_tokenizer, special_tokens


def take_texts(path: Path, templates: ChatTemplates) -> Tokenizer:
    """Returns the file's tokenizer, and puts its chat templates, if it has some, into templates."""
    file, prefix = GgufFile(path), "tokenizer.chat_template"
    found = {
        name.removeprefix(prefix).removeprefix(".") or "default": template
        for name, template in file.metadata.items()
        if (name == prefix or name.startswith(f"{prefix}.")) and isinstance(template, str)
    }
    if found:
        templates.put(found, f"{path}, {prefix}", special_tokens(file))
    return gguf_tokenizer(file)
