"""A folder's tokenizer as `transformers` makes it: tokenizer.json, and the tokens it lacks from the files beside it.

`tokenizers` alone would cut or pad every text where tokenizer.json was saved with truncation or padding, and would
split a token that only tokenizer_config.json, special_tokens_map.json or added_tokens.json names, or show a special one
as text. Which file counts, and in what order tokens get ids, is as in transformers 5.23: `from_pretrained` in
tokenization_utils_base.py, `__init__` in tokenization_utils_tokenizers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

TOKENIZER, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED, LISTED = "added_tokens.json", "added_tokens_decoder"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER, _OLDER, _OWN = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(NamedTuple):
    """The special tokens of a folder. named: "bos_token" and the like, also names of the model's own, which a chat
    template may use. further: those of a list, which have no name."""

    named: dict[str, AddedToken]
    further: list[AddedToken]


def special_tokens(folder: Path, padding: str | None = None) -> SpecialTokens:
    """The special tokens that tokenizer_config.json and special_tokens_map.json name. The latter goes first where the
    former has no added_tokens_decoder, and is not read where it has one. padding: the pad_token where they say none.

    Raises ValueError, which names the file, for one that is no JSON object, and for a token that is none.
    """
    fields = read_config(folder / CONFIG)
    if _OLDER in fields and not fields.get(_FURTHER):
        fields[_FURTHER] = fields.pop(_OLDER)
    own = {name: fields.pop(name) for name in [*fields] if name not in _NAMES and _is_named_text(name, fields[name])}
    own |= _pop_named(fields)
    where, listed = str(folder / CONFIG), fields.pop(_OWN, None) or {}
    if not isinstance(listed, Mapping):
        raise ValueError(f'{where}: {_OWN}: expected {{"name": token}}, got {json.dumps(listed)[:100]}')
    own = own or dict(listed)  # as in transformers, which writes the one or the other
    if fields.get(LISTED) is None and (folder / MAP).is_file():
        said = {name: _as_special(value) for name, value in read_config(folder / MAP).items()}
        if isinstance(said.get(_FURTHER), list):
            said[_FURTHER] = [*(fields.get(_FURTHER) or ()), *said[_FURTHER]]
        fields |= said
        own |= _pop_named(fields)
        where += f" and {MAP}"
    if _OLDER in fields:
        fields.setdefault(_FURTHER, fields[_OLDER])
    if padding is not None:
        fields.setdefault("pad_token", padding)
    others = {name: value for name, value in fields.items() if name not in _NAMES and name.endswith("_token")}
    others = {name: value for name, value in others.items() if isinstance(value, str | Mapping)}
    named = {name: fields.get(name) for name in _NAMES} | others | own
    further = fields.get(_FURTHER) or []
    if not isinstance(further, list):
        raise ValueError(f"{where}: {_FURTHER}: expected a list of tokens, got {type(further).__name__}")
    made = {name: _token(value, f"{where}: {name}") for name, value in named.items() if value is not None}
    for token in made.values():
        token.special = True
    return SpecialTokens(made, [_token(value, f"{where}: {_FURTHER}") for value in further])


def _is_named_text(name: str, value: Any) -> bool:
    return name.endswith("_token") and isinstance(value, str)


def _pop_named(fields: dict[str, Any]) -> dict[str, Any]:
    """Takes the named tokens out of the fields; extra_special_tokens may be {name: token}, too."""
    found = fields.get(_FURTHER)
    return dict(fields.pop(_FURTHER)) if isinstance(found, Mapping) else {}


def _as_special(value: Any) -> Any:
    """The token as a special one: special_tokens_map.json says of none that it is special."""
    if isinstance(value, list):
        return [_as_special(one) for one in value]
    return value | {"special": True} if isinstance(value, dict) and "content" in value else value


def _token(value: Any, where: str) -> AddedToken:
    """The token of a text, or of an object with its text as content."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(content, str):
        raise ValueError(f'{where}: expected a text or {{"content": a text, ...}}, got {json.dumps(value)[:100]}')
    return AddedToken(content, **{name: value[name] is True for name in _FLAGS if name in value})


def complete(tokenizer: Tokenizer, folder: Path) -> None:
    """Adds the tokens that the tokenizer lacks. Raises ValueError for a list of added tokens that is none, and for a
    token that cannot have the id that it names."""
    padding = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_config(folder / CONFIG)
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    special = special_tokens(folder, padding["pad_token"] if padding else None)
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get(LISTED)
    if listed is not None:
        tokens, where = dict(_of_config(listed, folder / CONFIG)), f"{folder / CONFIG}: {LISTED}"
    else:  # transformers' older form
        names = {token.content for name, token in special.named.items() if name in _NAMES}
        names |= {token.content for token in special.further}
        tokens, where = dict(_of_file(read_config(folder / ADDED), folder / ADDED, names)), str(folder / ADDED)
        tokens |= tokenizer.get_added_tokens_decoder()
    named = {token.content for token in special.named.values()}
    for token in (*tokens.values(), *special.further):
        token.special = token.special or token.content in named
    for number, token in sorted(tokens.items()):
        if repr(token) == repr(known.get(token.content)):
            continue
        tokenizer.add_tokens([token])  # of one that is known, the flags
        found = tokenizer.token_to_id(token.content)
        if token.content and token.content not in known and found != number:
            raise ValueError(
                f"{where}: {token.content!r} is to have the id {number}, and behind tokenizer.json it would get "
                f"{found}: save the tokenizer with transformers' save_pretrained, which writes all into tokenizer.json"
            )
    added = {*known, *(token.content for token in tokens.values())}
    others = [token for token in (*special.named.values(), *special.further) if token.content not in added]
    # One of the vocabulary keeps its id, another gets the next. Of other flags for one token the last new ones count.
    tokenizer.add_tokens([*{repr(token): token for token in others}.values()])


def _of_config(listed: Any, file: Path) -> Iterator[tuple[int, AddedToken]]:
    expected = f'{file}: {LISTED}: expected {{"ID": {{"content": a text, ...}}}}'
    if not isinstance(listed, Mapping):
        raise ValueError(f"{expected}, got {type(listed).__name__}")
    for number, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not str(number).isdecimal() or not isinstance(content, str):
            raise ValueError(f"{expected}, got {number!r}: {str(token)[:100]}")
        yield int(number), _token(token, expected)


def _of_file(listed: Mapping[str, Any], file: Path, special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    for content, number in listed.items():
        if type(number) is not int:
            raise ValueError(f'{file}: expected {{"token": ID}}, got {content!r}: {str(number)[:100]}')
        yield number, AddedToken(content, normalized=content not in special, special=content in special)


def read_config(file: Path) -> dict[str, Any]:
    """The fields of a file; {} where there is none. Raises ValueError, which names it, for what is no JSON object."""
    if not file.is_file():
        return {}
    again = "take the file from the model's publisher again"
    try:
        config = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {error.lineno}: expected JSON: {error.msg}: {again}") from None
    except RecursionError:
        raise ValueError(f"{file}: expected JSON, found brackets nested too deep: {again}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(config).__name__}: {again}")
    return config


def read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: expected UTF-8, found other bytes at position {error.start}: save it as UTF-8, or take the file "
            "from the model's publisher again"
        ) from None
