"""Conversations that every chat template of templates/ is given, and tools."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town <now> & later",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "as \"Köln\" or '東京'"},
                "days": {"type": "integer", "minimum": 1},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "hours": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["town"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


USER, ANSWER = (
    {"role": "user", "content": "  What is <1 + 1>?\n"},
    {"role": "assistant", "content": "It's 2.\n\n\nYes "},
)
SYSTEM = {"role": "system", "content": "Be \"brief\" & 'kind'."}
ASKED = {"role": "user", "content": "Weather?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", {"town": "Köln", "days": 2})]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "get_weather", "content": '{"sky": "<blue>", "t": 3.5}'}
TWO_CALLS = {
    "role": "assistant", "content": "Let me look.",
    "tool_calls": [call("get_weather", {"town": "東京", "hours": [1, 2.5]}), call("clock", {}, 1)],
}  # fmt: skip

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "Sure?"}],
    "system and turns": [SYSTEM, USER, ANSWER, ASKED, {"role": "assistant", "content": "Rain."}],
    "unicode": [{"role": "user", "content": "naïve 😀 e\u0301 \u2028 \u00a0東京 \x0b\x1c"}],
    "markup": [{"role": "user", "content": "{{ 7 * 7 }} {% raw %} <|im_end|> &lt;b&gt; \\n \r\n x"}],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "call": [ASKED, CALLED],
    "result": [ASKED, CALLED, RESULT],
    "call and answer": [SYSTEM, ASKED, CALLED, RESULT, {"role": "assistant", "content": "Blue."}, USER],
    "two calls": [ASKED, TWO_CALLS, RESULT, {**RESULT, "tool_call_id": "call00001", "content": "noon"}, ANSWER],
    "no content": [USER, {"role": "assistant", "content": None}, ASKED],
    "thought": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2", "name": "a"}, ASKED],
    "reasoning": [USER, {"role": "assistant", "content": "2", "reasoning_content": "hm\n"}],
    "reasoning and call": [ASKED, {**CALLED, "thinking": "look"}, RESULT],
    "parts": [
        {"role": "system", "content": [part("Be kind.")]},
        {"role": "user", "content": [part("  a <b>"), part("\nc ")]},
        {"role": "assistant", "content": [part("d")]},
    ],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "two systems": [SYSTEM, SYSTEM, USER, ANSWER],
    "wrong order": [ANSWER, USER, USER],
    "many": [
        m for i in range(5) for m in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"})
    ],
}
