"""The OpenAPI description: what the classes of protocol.py say, with the bounds of this server's model."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from reference_impl.serving.protocol import TOKEN_ID
from reference_impl.serving.runner import EngineHost


def describe_for(app: FastAPI, engine: EngineHost) -> None:
    """Makes `app.openapi` describe a server of this engine's model: its sizes and its defaults."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        described = describe()
        schemas = described["components"]["schemas"]
        for path in described["paths"].values():  # what FastAPI says of wrong fields, which are 400 here
            for operation in path.values():
                operation["responses"].pop("422", None)
        _bound_tokens(schemas, engine.vocab_size, engine.max_model_len - 1)
        for kind in ("CompletionRequest", "ChatRequest"):
            for name, value in engine.sampling_defaults.items():
                field = schemas[kind]["properties"][name]
                if name != "max_tokens":
                    field["default"] = value
                else:
                    field["description"] = f"at most {value} are generated, as the model's generation_config.json says"
        embedded, defaults = schemas["EmbeddingRequest"]["properties"], engine.embedding_defaults
        embedded["normalize"]["default"] = defaults.normalize
        if defaults.refusal is None:
            embedded["pooling"]["default"] = defaults.pooling
        for conversation in (
            schemas["ChatRequest"]["properties"]["messages"],
            schemas["TokenizeRequest"]["properties"]["messages"]["anyOf"][0],
        ):
            conversation.pop("maxItems", None)  # the context is full, or the body too long, long before
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _bound_tokens(schema: Any, vocabulary: int, longest: int) -> None:
    """Bounds token ids by the vocabulary and prompts by the length; the classes of protocol.py depend on no model."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema.pop("exclusiveMaximum", None)
            schema["maximum"] = vocabulary - 1
        items = schema.get("items")
        if isinstance(items, dict) and items.get("title") == TOKEN_ID:
            schema["maxItems"] = min(longest, schema.get("maxItems", longest))
        for value in schema.values():
            _bound_tokens(value, vocabulary, longest)
    elif isinstance(schema, list):
        for value in schema:
            _bound_tokens(value, vocabulary, longest)
