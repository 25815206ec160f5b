"""Calls in a model's text: complete ones are found, however the text is cut; all else stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reference_impl.features.chat.tool_calls import PARSERS, ToolCall, check_parser, parse

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"t": "é </tool_call> } \\" {"}}'
LF, LG = F.replace("arguments", "parameters"), G.replace("arguments", "parameters")
CALLED_F, CALLED_G = ToolCall("f", '{"a": 1}'), ToolCall("g", '{"t": "é </tool_call> } \\" {"}')
TAG = "<|python_tag|>"


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


HERMES: list[tuple[str, str, list[ToolCall]]] = [
    ("", "", []),
    ("  \n", "  \n", []),
    ("no calls, <b> & {1}\n", "no calls, <b> & {1}\n", []),
    (call(F), "", [CALLED_F]),
    (f"\n{call(F)}\n", "", [CALLED_F]),
    (f"<tool_call>{F}</tool_call>", "", [CALLED_F]),
    (f"Let me look.\n{call(F)}", "Let me look.\n", [CALLED_F]),
    (f"{call(F)}\n{call(G)}", "", [CALLED_F, CALLED_G]),
    (f"a{call(F)}\nb {call(G)} c", "a\nb  c", [CALLED_F, CALLED_G]),
    (f"<tool_call>\n{F}", "", [CALLED_F]),  # the end token stood for the closing tag
    (f"{call(F)}\n<tool_call>\n{F[:-3]}", "\n<tool_call>\n" + F[:-3], [CALLED_F]),
    (call(F[:-1]), call(F[:-1]), []),
    (call("{'name': 'f'}"), call("{'name': 'f'}"), []),
    (call("f(1)"), call("f(1)"), []),
    (call('{"name": "f"}'), call('{"name": "f"}'), []),
    (call('{"name": 5, "arguments": {}}'), call('{"name": 5, "arguments": {}}'), []),
    (call('{"name": "f", "arguments": [1]}'), call('{"name": "f", "arguments": [1]}'), []),
    (call('{"name": "f", "arguments": {"a": NaN}}'), call('{"name": "f", "arguments": {"a": NaN}}'), []),
    (call('{"name": "f", "arguments": {"a": 1e999}}'), call('{"name": "f", "arguments": {"a": 1e999}}'), []),
    (call('{"name": "f", "arguments": {"a": "\\ud83d"}}'), call('{"name": "f", "arguments": {"a": "\\ud83d"}}'), []),
    (call(F + " x"), call(F + " x"), []),
    (call("{]" + F), call("{]" + F), []),
    (call(call(F)), "<tool_call>\n\n</tool_call>", [CALLED_F]),
    (f"{call('{broken}')}{call(F)}", call("{broken}"), [CALLED_F]),
    ("<tool_call", "<tool_call", []),
    ("<tool_call>", "<tool_call>", []),
    ("<<tool_call>" + F + "</tool_call>", "<", [CALLED_F]),
    (call('{"name": "f", "arguments": {}}'), "", [ToolCall("f", "{}")]),
]
LLAMA: list[tuple[str, str, list[ToolCall]]] = [
    ("", "", []),
    (" \n", " \n", []),
    ("text; more", "text; more", []),
    (LF, "", [CALLED_F]),
    (F, "", [CALLED_F]),
    (f" \n{LF}\n", "", [CALLED_F]),
    (f"{TAG}{LF}", "", [CALLED_F]),
    (f"{TAG} {LF}", "", [CALLED_F]),
    (f"{LF}; {LG}", "", [CALLED_F, CALLED_G]),
    (f"{LF}\n{LG};", "", [CALLED_F, CALLED_G]),
    (f"Let me look. {TAG}{LF}", "Let me look. ", [CALLED_F]),
    (f"x {LF}", f"x {LF}", []),  # text first, and no tag
    (f"{LF}; and so on", "; and so on", [CALLED_F]),
    ('{"answer": 5}', '{"answer": 5}', []),
    ('{"answer": 5} ' + LF, '{"answer": 5} ' + LF, []),
    (LF[:-1], LF[:-1], []),
    (f"{TAG}print(1)", f"{TAG}print(1)", []),
    (f"{TAG}print(1) {TAG}{LF}", f"{TAG}print(1) ", [CALLED_F]),
    (TAG, TAG, []),
    ("<|python", "<|python", []),
    ("{'name': 'f', 'parameters': {}}", "{'name': 'f', 'parameters': {}}", []),
]
CASES = [("hermes", *case) for case in HERMES] + [("llama3_json", *case) for case in LLAMA]


def pushed(name: str, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = PARSERS[name]()
    found = [given for piece in pieces for given in parser.push(piece)] + parser.finish()
    assert parser.num_calls == sum(isinstance(piece, ToolCall) for piece in found)
    return "".join(p for p in found if isinstance(p, str)), [p for p in found if isinstance(p, ToolCall)]


@pytest.mark.parametrize(("name", "text", "rest", "calls"), CASES)
def test_calls_and_text(name: str, text: str, rest: str, calls: list[ToolCall]) -> None:
    assert parse(text, PARSERS[name]()) == (rest, calls)
    assert pushed(name, list(text)) == (rest, calls)
    for at in range(len(text)):
        assert pushed(name, [text[:at], text[at:]]) == (rest, calls)


TOKENS = st.sampled_from(
    ["<tool_call>", "</tool_call>", TAG, "<", "tool_", "|>", F, LG, "{", "}", '"', "\\", "[", "]", ";", " ", "\n", "é"]
)


@pytest.mark.parametrize("name", sorted(PARSERS))
@given(st.lists(TOKENS, max_size=12))
@example([TAG, F, ";", " ", TAG, "x"])
def test_however_a_text_is_cut(name: str, tokens: list[str]) -> None:
    text = "".join(tokens)
    whole = parse(text, PARSERS[name]())
    assert pushed(name, list(text)) == pushed(name, tokens) == whole
    if not whole[1]:
        assert whole[0] == text  # nothing is lost
    for found in whole[1]:
        assert isinstance(json.loads(found.arguments), dict)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = PARSERS["hermes"]()
    assert parser.push("Let me <") == ["Let me "]
    assert parser.push("b") == ["<b"]
    assert parser.push("><tool_call>" + F[:20]) == [">"]
    assert parser.push(F[20:]) == []
    assert parser.push("</tool_call>") == [CALLED_F]
    parser = PARSERS["llama3_json"]()
    assert parser.push("Hel") == ["Hel"]
    parser = PARSERS["llama3_json"]()
    assert parser.push(LF[:-1]) == []
    assert parser.push(LF[-1]) == [CALLED_F]


def test_each_call_has_an_id_of_its_own() -> None:
    _, calls = parse(call(F) * 20, PARSERS["hermes"]())
    assert len({found.id for found in calls}) == 20
    assert all(found.id.startswith("call_") for found in calls)


def test_another_parser_is_refused_by_name() -> None:
    assert check_parser(None) is None
    assert check_parser("hermes") == "hermes"
    with pytest.raises(ValueError, match="tool_call_parser: expected 'hermes' or 'llama3_json', got 'pythonic'"):
        check_parser("pythonic")
