"""The routes, and what is refused with which status.

400 bad JSON or a wrong field, with its place; the engine refuses the prompt (with the numbers), or the chat template
does (with its line) · 401 API key · 404 no such model, request or place · 408, 413, 415 the body comes too slowly, is
too long, is not JSON · 421 the name of another host · 429 too many unfinished requests, with Retry-After · 500 for this
request the model gave numbers that are not finite, or its output could not be made text · 503 the engine restarts, with
Retry-After; it has failed, or shuts down.

With API keys, every path that names requests needs one, too; /health, /ready, /metrics and the page, which is empty
without the data that it fetches, do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer

from reference_impl.core.detokenizer import text_of
from reference_impl.features.chat.messages import MessageError
from reference_impl.features.chat.tool_calls import check_parser
from reference_impl.features.texts.tokens import TokenText
from reference_impl.interfaces import SamplingParams
from reference_impl.serving import answers
from reference_impl.serving.answers import ChatShape, CompletionShape, Shape
from reference_impl.serving.chat import chat_arguments, parser_for
from reference_impl.serving.connection import Answer, BodyLimit, is_addressed_to
from reference_impl.serving.description import describe_for
from reference_impl.serving.limits import ConnectionLimits
from reference_impl.serving.metrics import LAST
from reference_impl.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from reference_impl.serving.refusals import HANDLERS, REFUSALS, Refused, check_characters, refusal
from reference_impl.serving.responses import as_a_whole, as_events, retry_header, unavailable
from reference_impl.serving.runner import Overloaded, Restarting, Runner, Stream, Unavailable
from reference_impl.serving.together import of_one_engine

RETRY_SECONDS = 1
# With API keys: the beginnings of the paths that need one.
NEED_A_KEY = ("/v1/", "/requests/", "/status.json", "/tokenize", "/detokenize")
Objective = Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds")]
Last = Annotated[int, Query(ge=1, le=LAST, description="finished requests")]
EngineNumber = Annotated[int, Query(ge=0, description="of a fleet")]


@dataclass(frozen=True)
class ServerConfig:
    """How a server answers. model_name: what clients call the model. api_keys: without any, every client is served.

    max_unfinished: samples that may be unfinished at once, running or waiting. max_body_bytes: of a request.
    limits: those of a connection. only_host: the name that requests must be addressed to, if not to an IP address or to
    localhost; None: any. tool_call_parser: the form in which the model calls tools, "hermes" or "llama3_json"; None:
    requests with tools are refused.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_unfinished: int = 512
    max_body_bytes: int = 4 << 20
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    only_host: str | None = None
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        check_parser(self.tool_call_parser)
        for number, key in enumerate(self.api_keys, 1):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ValueError(f"API key {number}: expected visible ASCII characters, which a header can carry")


def make_app(runner: Runner, config: ServerConfig) -> FastAPI:
    """The application; the caller begins and ends the runner."""
    server = _Server(runner, config)
    app = FastAPI(
        title="inferlab",
        summary="An LLM inference engine to look into",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to any host that the client names
    )
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, refuse=refusal, stop=server.stop_strangers)
    for kind, handler in HANDLERS:
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type]
    allowed = [Depends(HTTPBearer(auto_error=False))] if config.api_keys else []
    stream: dict[str, Any] = {"text/event-stream": {}}
    answered: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "content": stream}, **REFUSALS}
    for path, endpoint in (("/v1/completions", server.complete), ("/v1/chat/completions", server.chat)):
        app.post(
            path, dependencies=[*allowed, Depends(_said_to_be_json)], responses=answered, response_model=dict[str, Any]
        )(endpoint)
    keyed: dict[str, Any] = {"dependencies": [*allowed, Depends(_said_to_be_json)], "responses": REFUSALS}
    app.post("/tokenize", **keyed)(server.tokenize)
    app.post("/detokenize", **keyed)(server.detokenize)
    app.get("/", include_in_schema=False)(server.here)
    app.get("/version")(server.version)
    app.post("/v1/embeddings", **keyed, response_model=dict[str, Any])(server.embed)
    describe_for(app, runner.engine)
    app.get("/v1/models", dependencies=allowed, responses={401: REFUSALS[401]})(server.models)
    app.get("/v1/models/{model:path}", dependencies=allowed, responses={s: REFUSALS[s] for s in (401, 404)})(
        server.one_model
    )
    app.get("/health", responses={503: REFUSALS[503]})(server.health)
    app.get("/ready", responses={503: REFUSALS[503]})(server.ready)
    app.get("/metrics", response_class=PlainTextResponse)(server.metrics)
    app.get("/status", response_class=HTMLResponse)(server.status_page)
    app.get("/status.json", dependencies=allowed, responses={s: REFUSALS[s] for s in (400, 401)})(server.status)
    app.get("/requests/{answer:path}/timeline", dependencies=allowed, responses={s: REFUSALS[s] for s in (401, 404)})(
        server.timeline
    )
    return app


class _Server:
    def __init__(self, runner: Runner, config: ServerConfig):
        self.runner, self.config, self.engine = runner, config, runner.engine
        self.started, self.defaults = time.time(), self.engine.sampling_defaults
        if self.engine.prompts.tokenizer is None:
            raise ValueError("this model folder has no tokenizer.json: the server cannot speak text")
        self.tokens = TokenText(self.engine.prompts.tokenizer)

    def stop_strangers(self, request: Request) -> Response | None:
        """A refusal for a request without a valid host or key, whose body is then not read; else None. The OpenAPI
        description says which routes need one."""
        host, own = request.headers.get("host", "localhost"), self.config.only_host
        if own is not None and not is_addressed_to(own, host):
            message = f"expected the header Host: an IP address, localhost or {own}, got {host!r}"
            return refusal(421, f"{message}. Without API keys no other name is served: with --api-key any name is")
        if not self.config.api_keys or not request.url.path.startswith(NEED_A_KEY):
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.config.api_keys]
        if scheme.lower() == "bearer" and any(known):
            return None
        return refusal(
            401, "expected the header Authorization: Bearer KEY with a key of this server", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip

    # --- completions ----------------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest) -> Response:
        """Continue one or several prompts, texts or token ids."""
        self._check_model(body.model)
        prompts = await asyncio.to_thread(self._encode, body.prompts)
        shape = CompletionShape(
            self.config.model_name, "text_completion", "text_completion", "cmpl", self.tokens, body.logprobs,
            body.include_usage, body.continuous_usage, body.prompt_logprobs, prompts, body.n,
            echo=await asyncio.to_thread(self._texts, body.prompts) if body.echo else None,
            only_echo=not body.max_tokens, skips_special=body.skip_special_tokens, acceptance=self.engine.acceptance,
        )  # fmt: skip
        wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
        scores = max((k for k in wanted if k is not None), default=None)
        sampling = self._sampling(lambda: body.sampling(body.max_tokens or 1, body.logprobs, scores, self.defaults))
        return await self._answer(shape, prompts, sampling, body)

    async def embed(self, body: EmbeddingRequest) -> Response:
        """The pooled hidden states of one or several inputs, texts or token ids."""
        self._check_model(body.model)
        try:
            pooling, normalized = self.engine.embedding_defaults.resolve(body.pooling, body.normalize)
        except ValueError as error:
            raise Refused(400, str(error), param="pooling") from None
        prompts = await asyncio.to_thread(self._encode, body.prompts, "input")
        stream = await self._start(
            f"embd-{uuid.uuid4().hex}", prompts, SamplingParams(max_tokens=1), "input", pooling=pooling,
            priority=body.priority, cache_salt=body.cache_salt,
        )  # fmt: skip
        in_base64 = body.encoding_format == "base64"
        name = self.config.model_name
        respond = as_a_whole(lambda: answers.embeddings(stream, name, in_base64, normalized))
        return Answer(respond, stream.close)

    async def chat(self, body: ChatRequest) -> Response:
        """Answer a conversation, with the chat template of the model's tokenizer."""
        self._check_model(body.model)
        logprobs = body.top_logprobs if body.logprobs else None
        parser, prompt = parser_for(body, self.config.tool_call_parser), await self._chat_prompt(body)
        shape = ChatShape(
            self.config.model_name, "chat.completion", "chat.completion.chunk", "chatcmpl", self.tokens, logprobs,
            body.include_usage, body.continuous_usage, body.prompt_logprobs, [prompt], body.n, tool_call_parser=parser,
            acceptance=self.engine.acceptance,
        )  # fmt: skip
        fits = max(1, self.engine.max_model_len - len(prompt))
        asked = body.max_completion_tokens or body.max_tokens or fits
        sampling = self._sampling(lambda: body.sampling(asked, logprobs, body.prompt_logprobs, self.defaults))
        return await self._answer(shape, [prompt], sampling, body)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids, as vLLM gives them."""
        self._check_model(body.model)
        if body.messages is not None:
            tokens = await self._chat_prompt(body)
        else:
            [tokens] = await asyncio.to_thread(
                self._encode, [body.prompt or ""], add_special_tokens=body.add_special_tokens
            )
        texts = [self.tokens.text(token) for token in tokens] if body.return_token_strs else None
        return {
            "count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens, "token_strs": texts,
        }  # fmt: skip

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        self._check_model(body.model)
        for token in body.tokens:
            if token >= self.engine.vocab_size:
                message = f"tokens: {token} is outside the vocabulary [0, {self.engine.vocab_size})"
                raise Refused(400, message, param="tokens")
        [text] = await asyncio.to_thread(self._texts, [body.tokens])
        return {"prompt": text}

    async def here(self) -> dict[str, Any]:
        """What a browser that was given the server's address shows."""
        return {
            "server": "inferlab",
            "models": "/v1/models",
            "generate": ["/v1/completions", "/v1/chat/completions"],
            "health": ["/health", "/ready"],
            "metrics": "/metrics",
            "status": "/status",
            "description": "/openapi.json",
        }

    async def version(self) -> dict[str, str]:
        return {"version": metadata.version("inferlab")}

    async def _chat_prompt(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        try:
            return await asyncio.to_thread(self.engine.prompts.chat_prompt, **chat_arguments(body))
        except MessageError as error:
            raise Refused(400, str(error), param=error.place) from None
        except ValueError as error:  # no template, or it refuses, or is wrong
            raise Refused(400, str(error), param="messages") from None

    def _encode(self, prompts: Sequence[str | list[int]], field: str = "prompt", **options: Any) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                check_characters(prompt, f"{field} {number}" if len(prompts) > 1 else field)
        encode, tokens_of = self.engine.prompts.encode, self.engine.prompts.tokens_of
        return [tokens_of(p, **options) if isinstance(p, str) and options else encode(p) for p in prompts]

    def _texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        tokenizer = self.engine.prompts.tokenizer
        assert tokenizer is not None  # see __init__
        return [p if isinstance(p, str) else text_of(tokenizer, p) for p in prompts]

    def _sampling(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ValueError as error:
            message = str(error).removeprefix("SamplingParams.")  # the name of a field of the body, too
            raise Refused(400, message, param=_named_in(message), code="invalid_value") from None

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.config.model_name):
            message = f"the model {name!r} does not exist; this server has {self.config.model_name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    async def _answer(
        self, shape: Shape, prompts: Sequence[Sequence[int]], sampling: Any, body: CompletionRequest | ChatRequest
    ) -> Response:
        vocabulary = self.engine.vocab_size
        named = ("stop_token_ids", "logit_bias", "allowed_token_ids")
        for name, tokens in ((name, getattr(body, name) or ()) for name in named):
            for token in tokens:
                if token >= vocabulary:
                    message = f"{name}: {token} is outside the vocabulary [0, {vocabulary})"
                    raise Refused(400, message, param=name, code="invalid_value")
        options = {"priority": body.priority, "cache_salt": body.cache_salt}
        stream = await self._start(shape.id, prompts, sampling, "prompt", **options)
        respond = as_events(shape, stream) if body.stream else as_a_whole(lambda: shape.whole(stream))
        return Answer(respond, stream.close)

    async def _start(
        self, name: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, field: str, **options: Any
    ) -> Stream:
        try:
            return await self.runner.start(name, prompts, sampling, **options)
        except ValueError as error:
            code = "context_length_exceeded" if "tokens" in str(error) else None
            raise Refused(400, str(error), param=_named_in(str(error)) or field, code=code) from None
        except Overloaded as error:
            retry = {"Retry-After": str(RETRY_SECONDS)}
            raise Refused(429, f"{error}: try again in a moment", headers=retry) from None
        except Unavailable as error:
            raise unavailable(error) from None

    # --- what there is, and how it is ------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def one_model(self, model: str) -> dict[str, Any]:
        self._check_model(model)
        return self._model()

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.config.model_name, "object": "model", "created": int(self.started), "owned_by": "inferlab",
            "max_model_len": self.engine.max_model_len,
        }  # fmt: skip

    async def health(self) -> dict[str, str]:
        """200 while the engine lives; while it restarts, and when it has failed, 503 with the reason."""
        if self.runner.restarting is not None:
            raise unavailable(Restarting(self.runner.restarting))
        if self.runner.failure is not None:
            raise Refused(503, f"the engine has failed: {self.runner.failure}")
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """200 while new requests are taken."""
        if not self.runner.is_ready:
            why = self.runner.restarting or self.runner.failure or "the server is shutting down"
            raise Refused(503, why, headers=retry_header(self.runner.restarting is not None))
        return {"status": "ready"}

    async def metrics(self) -> PlainTextResponse:
        """Prometheus. While there is no engine, only what is known without one."""
        text = self.runner.metrics()
        with contextlib.suppress(Unavailable):
            text = await self.runner.ask("metrics") + text
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status_page(self) -> HTMLResponse:
        """A page that shows requests, blocks and hits, refreshed every second; it asks the user for a key, if any."""
        return HTMLResponse((Path(__file__).parent / "status.html").read_text("utf-8"))

    async def status(
        self, ttft: Objective = 0.5, tpot: Objective = 0.05, last: Last = 200, engine: EngineNumber = 0
    ) -> dict[str, Any]:
        """What the page shows: what runs; of the last finished requests percentiles, and goodput under objectives.
        engine: of a fleet, which; with a line about each."""
        mine = {"model": self.config.model_name, "uptime": time.time() - self.started}
        return mine | of_one_engine(await self._ask("status", last, ttft, tpot), engine)

    async def timeline(self, answer: str) -> dict[str, Any]:
        """What happened to an answer's requests, by the id that it carries: cmpl-..., chatcmpl-..."""
        try:
            found: dict[str, Any] = await self._ask("timeline", answer)
            return found
        except ValueError as error:
            raise Refused(404, str(error)) from None

    async def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return await self.runner.ask(name, *arguments)
        except Unavailable as error:
            raise unavailable(error) from None


def _said_to_be_json(request: Request) -> None:
    """Refuses a body of another content type than JSON: any page can make a browser send those to this server."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, f"expected the header Content-Type: application/json, got {kind or 'none'}")


def _named_in(message: str) -> str | None:
    """The field that an error's text begins with."""
    named = re.match(r"\w+(?=: )", message)
    return named and named[0]
