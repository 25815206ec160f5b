"""A folder's tokenizer as `transformers` makes it: tokenizer.json, and of the files beside it the tokens it lacks.

`tokenizers` alone would cut or pad every text where tokenizer.json was saved with truncation or padding, and would
split an added token that only tokenizer_config.json (added_tokens_decoder) or added_tokens.json names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from reference_impl.features.chat.templates import CONFIG, read_config, special_tokens

ADDED = "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def complete(tokenizer: Tokenizer, folder: Path) -> None:
    """ValueError for a list of added tokens that is none, and for a token that cannot have the id that it names."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_config(folder / CONFIG)
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        _add(tokenizer, dict(_of_config(listed, folder / CONFIG)), f"{folder / CONFIG}: added_tokens_decoder")
    else:  # transformers' older form
        further = config.get("additional_special_tokens")
        special = {*special_tokens(config).values(), *(further if isinstance(further, list) else ())}
        _add(tokenizer, dict(_of_file(read_config(folder / ADDED), folder / ADDED, special)), str(folder / ADDED))


def _of_config(listed: Any, file: Path) -> Iterator[tuple[int, AddedToken]]:
    expected = f'{file}: added_tokens_decoder: expected {{"ID": {{"content": a text, ...}}}}'
    if not isinstance(listed, Mapping):
        raise ValueError(f"{expected}, got {type(listed).__name__}")
    for number, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not str(number).isdecimal() or not isinstance(content, str):
            raise ValueError(f"{expected}, got {number!r}: {str(token)[:100]}")
        yield int(number), AddedToken(content, **{name: token[name] is True for name in _FLAGS if name in token})


def _of_file(listed: Mapping[str, Any], file: Path, special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    for content, number in listed.items():
        if type(number) is not int:
            raise ValueError(f'{file}: expected {{"token": ID}}, got {content!r}: {str(number)[:100]}')
        yield number, AddedToken(content, normalized=content not in special, special=content in special)


def _add(tokenizer: Tokenizer, tokens: Mapping[int, AddedToken], where: str) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in sorted(tokens.items()):
        if not token.content or token.content in known:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(
                f"{where}: {token.content!r} is to have the id {number}, and behind tokenizer.json it would get "
                f"{found}: save the tokenizer with transformers' save_pretrained, which writes all into tokenizer.json"
            )
