"""What may be asked of the server: the bodies of OpenAI's completions and chat completions, with vLLM's additions.

A field that would change the answer and is not implemented is refused by name; fields that cannot change it (`user`,
`metadata`, ...) are taken and ignored. Source of names and defaults: OpenAI's API reference; vLLM's for the additions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from reference_impl.interfaces import SamplingParams
from reference_impl.serving.messages import Message, Shown


def _whole(value: Any, depth: int = 2) -> Any:
    """Turns 5.0 into 5, also in lists and lists of lists: JSON has one kind of number. true and "5" stay."""
    if isinstance(value, list) and depth:
        return [_whole(item, depth - 1) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


NOT_IMPLEMENTED = "not_implemented"  # a kind of error, whose context names the field
OF_A_FIELD = "of_a_field"  # the same, where two fields do not go together
Number = Annotated[float, Field(strict=True)]
TOKEN_ID = "Token id"  # as the description calls it
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31, title=TOKEN_ID)]
MAX_PROMPTS, MAX_STOP, MAX_STOP_CHARACTERS = 64, 16, 1000
MAX_BIASES, MAX_ALLOWED, MAX_BAD_WORDS = 1024, 16_384, 256
MAX_MESSAGES, MAX_FIELDS, MAX_INPUTS = 10_000, 100, 2048
BadWord = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS, pattern=r"\S")]

# What OpenAI's clients may send and this server cannot do. A value that changes nothing is accepted.
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (None,), "echo": (None, False), "suffix": (None, ""),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, False, True),
    "functions": (None, []), "function_call": (None, "none"), "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,), "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"), "web_search_options": (None,), "guided_json": (None,), "guided_regex": (None,),
    "use_beam_search": (None, False), "length_penalty": (None, 1), "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
}  # fmt: skip
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip


_BIASES = {
    "type": "object", "maxProperties": MAX_BIASES, "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "description": "By token id, what is added to its logit",
}  # fmt: skip
_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "title": TOKEN_ID}, "minItems": 1}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOP = {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP}]}


def _prompt_schema(title: str, most: int) -> dict[str, Any]:
    several = [{"type": "array", "items": item, "minItems": 1, "maxItems": most} for item in (_TEXT, _TOKENS)]
    described = "A text, token ids, or several of either"
    return {"title": title, "description": described, "anyOf": [_TEXT, _TOKENS, *several]}


PROMPT_SCHEMA = _prompt_schema("Prompt", MAX_PROMPTS)
INPUT_SCHEMA = _prompt_schema("Input", MAX_INPUTS)


def _without_nulls(data: Any) -> Any:
    """The request without fields that are null: OpenAI's clients send null for the default."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def _null_is_the_default(schema: dict[str, Any]) -> None:
    """Allows null in the description wherever there is a default: OpenAI's clients send it for what they leave out."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            told = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **told}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra=_null_is_the_default)

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # accepted, and nothing is added
    continuous_usage_stats: Annotated[
        StrictBool, Field(description="vLLM's, with include_usage: each chunk has the usage of its choice so far")
    ] = False

    _nulls = model_validator(mode="before")(_without_nulls)


class _Sampling(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_null_is_the_default)

    model: str | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    temperature: Annotated[Number, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Number, Field(ge=1e-9, le=1)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str | list[str] | None, WithJsonSchema(_STOP)] = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[Number, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES),
        WithJsonSchema(_BIASES),
    ] = Field(default_factory=dict)
    # vLLM's additions.
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31, description="0 or -1: off")] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    ignore_eos: StrictBool = False
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED, description="no other is drawn")] | None
    ) = None
    bad_words: Annotated[
        list[BadWord], Field(max_length=MAX_BAD_WORDS, description="the token that would complete one is not drawn")
    ] = Field(default_factory=list)
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(f"expected at most {MAX_FIELDS} fields, got {len(data)}")
        kept = {name: value for name, value in data.items() if name not in _IGNORED}
        for name, harmless in _ASKS_FOR_NOTHING.items():
            if name in kept and name not in cls.model_fields:
                if kept[name] not in harmless and not (name == "best_of" and kept[name] == data.get("n", 1)):
                    raise PydanticCustomError(
                        NOT_IMPLEMENTED, "{field} is not implemented: leave it out", {"field": name}
                    )
                del kept[name]
        return {name: _whole(value) for name, value in _without_nulls(kept).items()}

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stop_strings(cls, stop: Any) -> Any:
        strings = stop if isinstance(stop, list) else [stop]
        if len(strings) > MAX_STOP or not all(
            isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in strings
        ):
            raise ValueError(f"expected at most {MAX_STOP} strings of 1 to {MAX_STOP_CHARACTERS} characters")
        return strings

    @model_validator(mode="after")
    def _fits_to_a_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError(OF_A_FIELD, "not available with stream=true", {"field": "prompt_logprobs"})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(OF_A_FIELD, "for stream=true only", {"field": "stream_options"})
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """The sampling parameters of a request. defaults: the model's, for fields that were not sent; its max_tokens
        bounds every answer, as in vLLM."""
        kept = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        own = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        return SamplingParams(
            **own | kept | {"max_tokens": min(max_tokens, defaults.get("max_tokens", max_tokens))},
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed % 2**64,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=self.n,
            logit_bias=self.logit_bias or None,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
        )


def _texts_or_token_ids(prompt: Any, most: int) -> Any:
    """A text, token ids, or at most `most` of either, unchanged."""

    def one(value: Any) -> Any:
        """A text, or token ids; None where it is neither."""
        tokens = isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
        return value if value and (isinstance(value, str) or tokens) else None

    if (alone := one(prompt)) is not None:
        return alone
    if isinstance(prompt, list) and len(prompt) > most:
        raise ValueError(f"expected a text, token ids, or at most {most} of either, got a list of {len(prompt)}")
    prompts = [one(value) for value in prompt] if isinstance(prompt, list) else []
    if not prompts or None in prompts or len({*map(type, prompts)}) > 1:
        raise ValueError("expected a text, token ids, or a list of either, and nothing empty")
    return prompts


def _as_list(prompt: Any) -> list[str | list[int]]:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return cast("list[str | list[int]]", prompt if several else [prompt])


class CompletionRequest(_Sampling):
    """POST /v1/completions"""

    prompt: Annotated[str | list[TokenId] | list[str] | list[list[TokenId]], WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[StrictInt, Field(ge=0, lt=2**31, description="0: with echo only")] = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: Annotated[StrictBool, Field(description="the prompt comes before the text, with logprobs if asked")] = False

    @model_validator(mode="after")
    def _nothing_only_with_echo(self) -> Self:
        if not self.max_tokens and not self.echo:
            message = "Input should be greater than or equal to 1, or 0 with echo"
            raise PydanticCustomError(OF_A_FIELD, message, {"field": "max_tokens"})
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as a list."""
        return _as_list(self.prompt)

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        return _texts_or_token_ids(prompt, MAX_PROMPTS)


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings"""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_null_is_the_default)

    input: Annotated[str | list[TokenId] | list[str] | list[list[TokenId]], WithJsonSchema(INPUT_SCHEMA)]
    model: str | None = None
    encoding_format: Annotated[Literal["float", "base64"], Field(description="base64: of little-endian float32")] = (
        "float"
    )
    # Additions.
    pooling: Annotated[
        Literal["mean", "last"] | None, Field(description="of the prompt's hidden states after the last norm")
    ] = None
    normalize: Annotated[StrictBool | None, Field(description="to length 1, as OpenAI's are")] = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("dimensions") is not None:
            raise PydanticCustomError(
                NOT_IMPLEMENTED, "{field} is not implemented: leave it out", {"field": "dimensions"}
            )
        kept = {name: value for name, value in data.items() if name not in ("user", "dimensions")}
        return {name: _whole(value) for name, value in _without_nulls(kept).items()}

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as a list."""
        return _as_list(self.input)

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, prompt: Any) -> Any:
        return _texts_or_token_ids(prompt, MAX_INPUTS)


def _chat_schema(schema: dict[str, Any]) -> None:
    _null_is_the_default(schema)
    alternatives = {"properties": {"top_logprobs": {"type": "integer", "minimum": 1}}, "required": ["top_logprobs"]}
    schema |= {"if": alternatives, "then": {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}}


class ChatRequest(_Sampling, Shown):
    """POST /v1/chat/completions"""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_chat_schema)

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31, description="deprecated by OpenAI")] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31, description="default: what fits")] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 0
    parallel_tool_calls: StrictBool = True

    @model_validator(mode="after")
    def _fields_that_need_others(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(OF_A_FIELD, "for logprobs=true only", {"field": "top_logprobs"})
        if self.tools and not self.parallel_tool_calls:
            raise PydanticCustomError(
                NOT_IMPLEMENTED, "{field}=false is not implemented: leave it out", {"field": "parallel_tool_calls"}
            )
        return self


def _one_of_two(schema: dict[str, Any]) -> None:
    _null_is_the_default(schema)
    kinds = {"prompt": {"type": "string"}, "messages": {"type": "array"}}
    schema["oneOf"] = [{"required": [name], "properties": {name: kind}} for name, kind in kinds.items()]


class TokenizeRequest(Shown):
    """POST /tokenize: a text, or a conversation in the model's chat template"""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_one_of_two)

    prompt: str | None = None
    add_special_tokens: Annotated[StrictBool, Field(description="to a prompt; a chat template writes its own")] = True
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    model: str | None = None
    return_token_strs: StrictBool = False

    _nulls = model_validator(mode="before")(_without_nulls)

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected prompt or messages, and not both")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_null_is_the_default)

    # As many as there are: not those of a prompt, which are bounded by what fits.
    tokens: list[Annotated[StrictInt, Field(ge=0, lt=2**31)]]
    model: str | None = None

    _nulls = model_validator(mode="before")(_without_nulls)

    @field_validator("tokens", mode="before")
    @classmethod
    def _whole_numbers(cls, tokens: Any) -> Any:
        return _whole(tokens)


# --- what is answered where something was wrong ---------------------------------------------------------------------


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail
