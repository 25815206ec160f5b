"""A folder's tokenizer as `transformers` makes it: tokenizer.json, and the tokens it lacks from the files beside it.

`tokenizers` alone would cut or pad every text where tokenizer.json was saved with truncation or padding, and would
split a token that only tokenizer_config.json, special_tokens_map.json or added_tokens.json names, or show a special one
as text. Which file counts, and in what order tokens get ids, is as in transformers 5.23: `from_pretrained` in
tokenization_utils_base.py, `__init__` in tokenization_utils_tokenizers.py. Of one token that is named with several sets
of flags the last one that is added counts. Where a folder names a class that cuts text by its own rules, see
tokenizer_rebuilt.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, processors

from reference_impl.models.tokenizer_classes import class_named

if TYPE_CHECKING:
    from reference_impl.models.tokenizer_rebuilt import TokenizerClass

TOKENIZER, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED, LISTED = "added_tokens.json", "added_tokens_decoder"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER, _OLDER, _OWN = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(NamedTuple):
    """The special tokens of a folder. named: "bos_token" and the like, also names of the model's own, which a chat
    template may use. further: those of a list, which have no name. as_texts: the texts of those that make a token of
    added_tokens.json special: one that tokenizer_config.json gives as an object with its type is not compared."""

    named: dict[str, AddedToken]
    further: list[AddedToken]
    as_texts: set[str]


def special_tokens(folder: Path, padding: str | None = None) -> SpecialTokens:
    """The special tokens that tokenizer_config.json and special_tokens_map.json name, and those of the class of
    `transformers` where these do not have the field. special_tokens_map.json goes first where tokenizer_config.json has
    no added_tokens_decoder, and is not read where it has one. padding: the pad_token where all of them say none.

    Raises ValueError, which names the file, for one that is no JSON object, and for a token that is none.
    """
    fields = read_config(folder / CONFIG)
    kind = _class_of(folder, fields)
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
    listed = fields.get(_FURTHER)
    plain = [*map(fields.get, _NAMES), *(listed if isinstance(listed, list) else ())]
    objects = [value for value in plain if isinstance(value, Mapping) and "__type" not in value]
    texts = {value for value in plain if isinstance(value, str)} | {str(value.get("content")) for value in objects}
    if _OLDER in fields:
        fields.setdefault(_FURTHER, fields[_OLDER])
    fields = {**(kind.special if kind else {}), **fields}
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
    return SpecialTokens(made, [_token(value, f"{where}: {_FURTHER}") for value in further], texts)


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


def _class_of(folder: Path, config: Mapping[str, Any]) -> TokenizerClass | None:
    """The class of `transformers` that rebuilds the folder's tokenizer, if it has such a one."""
    model = read_config(folder / "config.json")
    if not (config.get("tokenizer_class") or model) or not (folder / TOKENIZER).is_file():
        return None
    text = read_text(folder / TOKENIZER)
    name = class_named(config, model, text) if re.search(r'"merges"\s*:\s*\[', text) else None  # only BPE has them
    if name is None:
        return None
    from reference_impl.models.tokenizer_rebuilt import CLASSES

    return CLASSES[name]


def complete(tokenizer: Tokenizer, folder: Path) -> tuple[Tokenizer, SpecialTokens]:
    """The folder's tokenizer with the tokens that tokenizer.json's lacks, and its special tokens. The one that is given
    is changed. Raises ValueError for a list of added tokens that is none, and for a token that cannot have the id that
    it names."""
    padding = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_config(folder / CONFIG)
    special, kind = special_tokens(folder, padding["pad_token"] if padding else None), _class_of(folder, config)
    listed, own = config.get(LISTED), tokenizer.get_added_tokens_decoder()
    if kind is not None:
        from reference_impl.models.tokenizer_rebuilt import rebuilt

        tokenizer = rebuilt(tokenizer, kind, config)
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    if listed is not None:
        tokens, where = dict(_of_config(listed, folder / CONFIG)), f"{folder / CONFIG}: {LISTED}"
    else:  # transformers' older form
        found = _of_file(read_config(folder / ADDED), folder / ADDED, special.as_texts)
        tokens, where = dict(found), str(folder / ADDED)
        tokens |= own
    named = {token.content for token in special.named.values()}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [token for _, token in sorted(tokens.items())]
    texts = known | {token.content for token in new}
    for token in (*special.named.values(), *special.further):
        if token.content not in texts and token not in new:
            new.append(token)
    for token in new:
        token.special = token.special or token.content in named
    tokenizer.add_tokens(new)  # all at once: of one that is there, the flags; one of the vocabulary keeps its id
    ids: dict[str, list[int]] = {}
    for number, token in tokens.items():
        ids.setdefault(token.content, []).append(number)
    for content, numbers in ids.items():
        place = tokenizer.token_to_id(content)
        if content and content not in known and place not in numbers:
            file = f"{folder / TOKENIZER}: added_tokens" if numbers[0] in own and listed is None else where
            raise ValueError(
                f"{file}: {content!r} is to have the id {numbers[0]}, and transformers would give it {place}, since "
                "ids are given one after another, behind the vocabulary: name the tokens of all ids between these, too"
            )
    if kind is not None and kind.adds_all_special:
        every = dict.fromkeys(token.content for token in (*special.named.values(), *special.further))
        tokenizer.add_tokens([AddedToken(content, special=True) for content in every])
    if kind is not None and kind.post_processor == "bos" and "bos_token" in special.named:
        first = special.named["bos_token"].content
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", first, "$B"],
            special_tokens=[(first, tokenizer.token_to_id(first))],
        )
    return tokenizer, special


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
