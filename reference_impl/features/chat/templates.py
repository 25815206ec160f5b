"""The chat templates of a model's folder: where they are, their names, and which one a conversation gets."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_impl.models.tokenizer_files import CONFIG, read_config, read_text, special_tokens

if TYPE_CHECKING:
    from reference_impl.features.chat.renderer import Renderer

FILE, FURTHER = "chat_template.jinja", "additional_chat_templates"


class ChatTemplates:
    """The chat templates of a folder, by name; a single one is "default". special_tokens: those that a template may
    name, such as "bos_token".

    folder None: there are none. Raises ValueError with the file's name and what was expected in it.
    """

    def __init__(self, folder: Path | None):
        self.named: dict[str, str] = {}
        self.special_tokens: dict[str, str] = {}
        self._places: dict[str, str] = {}
        if folder is None:
            return
        config = read_config(folder / CONFIG)
        self.special_tokens = {name: token.content for name, token in special_tokens(folder).named.items()}
        for name, template in _in_config(config, folder / CONFIG).items():
            self.named[name], self._places[name] = template, CONFIG
        files = {"default": folder / FILE} if (folder / FILE).is_file() else {}
        files |= {file.stem: file for file in sorted((folder / FURTHER).glob("*.jinja"))}
        if files:  # they stand for all that the config has
            self.named = {name: read_text(file) for name, file in files.items()}
            self._places = {name: str(file.relative_to(folder)) for name, file in files.items()}

    @cached_property
    def renderer(self) -> Renderer:
        from reference_impl.features.chat.renderer import Renderer

        return Renderer()

    def take(self, file: Path) -> None:
        """Replaces all templates of the folder by the one in `file`. OSError or ValueError if it is not a text."""
        self.named, self._places = {"default": read_text(file)}, {"default": str(file)}

    def put(self, named: dict[str, str], where: str, special_tokens: dict[str, str]) -> None:
        """Replaces all templates by these, which have no files. where: what errors call them."""
        self.named, self._places = named, dict.fromkeys(named, where)
        self.special_tokens = special_tokens

    def broken(self) -> list[str]:
        """An error text for each template that is not Jinja: which one, and why."""
        from reference_impl.features.chat.renderer import ChatTemplateError

        found = []
        for name, template in self.named.items():
            try:
                self.renderer.check(template, self._place(name))
            except ChatTemplateError as error:
                found.append(str(error))
        return found

    def choose(self, asked: str | None, has_tools: bool) -> tuple[str, str]:
        """The template for a conversation, and what errors call it. asked: a template's name, a template itself, or
        None: "tool_use" if there are tools and such a template, else "default". Raises ValueError if there is none."""
        if asked is not None and asked not in self.named:
            if "{" in asked:
                return asked, "the given chat_template"
            raise ValueError(
                f"chat_template: expected a Jinja template, or the name of one of this model's: {self._names()}; "
                f"got {asked!r}"
            )
        name = asked or ("tool_use" if has_tools and "tool_use" in self.named else "default")
        if name not in self.named:
            raise ValueError(
                f"this model has several chat templates and none is the default: choose with chat_template= one of "
                f"{self._names()}"
            )
        return self.named[name], self._place(name)

    def _place(self, name: str) -> str:
        return self._places[name] + ("" if len(self.named) == 1 else f", chat template {name!r}")

    def _names(self) -> str:
        return ", ".join(map(repr, sorted(self.named))) or "none"


def _in_config(config: dict[str, Any], file: Path) -> dict[str, str]:
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if not isinstance(found, list):
        raise ValueError(f"{file}: chat_template: expected a text or a list, got {type(found).__name__}")
    named = {}
    for number, entry in enumerate(found):
        fields = entry if isinstance(entry, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            expected = 'expected {"name": a text, "template": a text}'
            raise ValueError(f"{file}: chat_template[{number}]: {expected}, got {json.dumps(entry)[:100]}")
        named[name] = template
    return named
