"""What a conversation is in a request: messages, tools, and how they are shown to the model.

Their insides are checked where Python's callers have theirs checked, too: features/chat/messages.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

MAX_PARTS, MAX_TOOLS = 1000, 1000

_PART = {
    "type": "object", "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}  # fmt: skip
_CALL = {
    "type": "object", "required": ["function"],
    "properties": {
        "id": {"type": ["string", "null"]}, "type": {"enum": ["function", None]},
        "function": {
            "type": "object", "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["string", "object", "null"], "description": "as written: JSON, or any text"},
            },
        },
    },
}  # fmt: skip
_FUNCTION: dict[str, Any] = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_TOOL = {
    "anyOf": [
        {"type": "object", "required": ["function"], "properties": {"function": _FUNCTION}},
        _FUNCTION | {"not": {"required": ["function"]}},  # templates know this form, too
    ],
}
Part = Annotated[dict[str, Any], WithJsonSchema(_PART)]
Call = Annotated[dict[str, Any], WithJsonSchema(_CALL)]
Tool = Annotated[dict[str, Any], WithJsonSchema(_TOOL)]


class Message(BaseModel):
    """One turn of a conversation. Text only. Other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(description="system, developer, user, assistant, tool: what the chat template knows")]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, data: Any) -> Any:
        """An answer comes back as a message of the next request, with its unused fields."""
        if not isinstance(data, dict):
            return data
        for name in ("audio", "function_call"):
            if data.get(name) is not None:
                raise PydanticCustomError("message", "{field} is not implemented: leave it out", {"field": name})
        empty = ("tool_calls", "annotations")
        return {n: v for n, v in data.items() if v is not None and not (n in empty and v == [])}

    def plain(self) -> dict[str, Any]:
        """The message as a dict for chat templates."""
        fields = {**self.__dict__, **(self.model_extra or {})}
        return {name: value for name, value in fields.items() if value is not None}


class Shown(BaseModel):
    """How a conversation is shown to the model. All but tools are vLLM's additions."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto"], Field(description="none: the model is not shown the tools")] = (
        "auto"
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="variables of the chat template, as enable_thinking")
    ] = None
    add_generation_prompt: StrictBool = True
    continue_final_message: Annotated[StrictBool, Field(description="needs add_generation_prompt=false")] = False
