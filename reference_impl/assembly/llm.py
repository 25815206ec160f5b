"""The front door: a folder of weights, text in, text out.

llm = LLM(course_model("target"))
print(llm.generate(["def open_file(file):\\n"], SamplingParams(max_tokens=32, temperature=0))[0].text)

To the loop of the core (`core_llm.py`) it adds what is chosen before it (folder or shape, device, dtype, quantization,
another process), n samples of a prompt, metrics, embeddings, beam search, and that Ctrl-C waits for the end of a step.
"""

from __future__ import annotations

import functools
import inspect
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from reference_impl.assembly.checks import check_tokenizer
from reference_impl.assembly.config import EngineConfig, ModelConfig
from reference_impl.assembly.devices import choose_device, choose_dtype
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.linear_methods import Quantizations
from reference_impl.assembly.model import dummy_model, load_model
from reference_impl.assembly.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    Generation,
    RequestOutput,
    embedding,
    with_all_calls,
)
from reference_impl.assembly.parts import Parts
from reference_impl.core import llm as core_llm
from reference_impl.core.engine import StepResult
from reference_impl.core.prompts import Prompt
from reference_impl.features.chat.prompts import (
    AnyPrompt,
    ChatEncoder,
    Conversation,
    ToolChoice,
    conversations,
    listed,
    plain,
)
from reference_impl.features.cpu.processor import use_no_more_threads_than_cores
from reference_impl.features.sizing.memory import give_back
from reference_impl.interfaces import Pooling, Request, SamplingParams
from reference_impl.models.checkpoints import is_gguf, read_config
from reference_impl.models.loader import lacks_head
from reference_impl.models.sampling_defaults import sampling_defaults

if TYPE_CHECKING:
    from reference_impl.features.beams.search import Beam
    from reference_impl.models.embedding_defaults import EmbeddingDefaults
    from reference_impl.models.shapes import Shape

__all__ = ["LLM", "CompletionOutput", "Generation", "RequestOutput"]

logger = logging.getLogger("inferlab.engine")

Worker = Literal["here", "process", "threads"]


Sampling = SamplingParams | Sequence[SamplingParams]


class LLM(core_llm.LLM, ChatEncoder):
    """An engine with a tokenizer.

    model: a Hugging Face folder, a GGUF file (x.gguf), or an id (org/name) of Hugging Face's hub, see `model_folder`.
    Or shape, with dummy_weights=True: a model of that shape with random weights and without a tokenizer (see
    models/shapes.py).
    dtype: "float32", "bfloat16", ... or None: see `choose_dtype`.
    quantization: "none" (or None), or how the linear layers' weights are stored: "fp8", "int8", "int4"; or a function
    from a layer's name to one of these (see `load_model`). On a CPU int8 is multiplied in float32 or float64 where
    dtype is one of these, and otherwise in bfloat16, faster; int4 in bfloat16 whatever dtype is.
    draft_model: folder or id of a smaller model with the same vocabulary, whose tokens are verified
    (speculative="draft"), or of a feature head, a module of multi-token prediction or Medusa heads for this model
    ("eagle", "mtp", "medusa"). worker: "process" has the model compute in a process of its own, to which steps go as
    messages, while this one plans. With tensor_parallel_size or pipeline_parallel_size each rank has a process of its
    own, or with "threads" a thread of this one.
    tool_call_parser: the form in which the model calls tools, "hermes" or "llama3_json", see `chat`; None: calls stay
    text. generation_config: vLLM's: "auto" takes temperature, top_p and the like that the folder's
    generation_config.json says, where no SamplingParams is given; "vllm" does not. Other options: see EngineConfig.
    vLLM's names work, too: gpu_memory_utilization (on a GPU the share of its memory for weights, activations and cache;
    on a CPU it has no effect, which is logged: see kv_cache_bytes), enable_prefix_caching, kv_cache_dtype,
    enforce_eager, num_gpu_blocks_override, kv_cache_memory_bytes; and those that
    change nothing here, with values that ask for what this engine does anyhow (trust_remote_code, swap_space, ...: see
    names.py).

    TypeError, with near matches, for an unknown option; ValueError or ConfigError for a value that cannot be;
    FileNotFoundError for an id that is not cached and cannot be fetched.
    """

    engine: Engine

    def __init__(
        self,
        model: str | Path | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        parts: Parts | None = None,
        quantization: Quantizations | None = "none",
        *,
        draft_model: str | Path | None = None,
        shape: Shape | None = None,
        dummy_weights: bool = False,
        worker: Worker = "here",
        tool_call_parser: str | None = None,
        generation_config: str = "auto",
        **engine_options: Any,
    ):
        from reference_impl.models.hub import model_folder

        self.tool_call_parser = tool_call_parser
        if tool_call_parser is not None:
            from reference_impl.features.chat.tool_calls import check_parser

            check_parser(tool_call_parser)
        model = None if model is None else model_folder(model)
        self.sampling_defaults = sampling_defaults(None if model is None else Path(model), generation_config)
        quantization = "none" if quantization is None else quantization
        config = _config_with(engine_options)
        draft = None if draft_model is None else Path(model_folder(draft_model))
        if draft is not None:
            from reference_impl.assembly.draft_folder import load_draft, with_method

            config = with_method(config, draft)
        stored = _config_of(model, shape, dummy_weights)
        device = choose_device(device)
        if device.type == "cpu":
            use_no_more_threads_than_cores()
            if engine_options.get("gpu_memory_utilization") is not None:
                logger.warning("gpu_memory_utilization has no effect on a CPU: kv_cache_bytes sizes the KV cache")
        dtype = choose_dtype(dtype, stored.dtype, device)
        options = dtype, device, config.max_model_len, config.attention, quantization
        give_back(device)
        if worker == "threads" and not config.is_divided:
            raise ValueError("worker='threads' is for several ranks: give tensor_parallel_size, or leave it out")
        if worker in ("process", "threads") or (worker == "here" and config.is_divided):
            engine = _elsewhere(model, dtype, device, config, parts, quantization, draft, worker == "threads")
        elif worker == "here":
            weights = dummy_model(stored, *options) if model is None else load_model(model, *options)
            if draft is not None:
                parts = replace(parts or Parts(), draft_model=load_draft(draft, dtype, device, config))
            engine = Engine(weights, config, parts)
        else:
            raise ValueError(f"worker: expected 'here', 'process' or 'threads', got {worker!r}")
        try:
            self.folder = None if model is None else Path(model)
            stored_alone = model is not None and not is_gguf(model) and lacks_head(Path(model), stored.tied_embeddings)
            self.has_head = not stored_alone
            super().__init__(engine, self.folder)
            if model is not None and is_gguf(model):
                from reference_impl.features.chat.gguf import take_texts

                self.tokenizer = take_texts(Path(model), self.templates)
            if model is not None:
                check_tokenizer(self.tokenizer, stored.vocab_size, Path(model))
                self.vocab_size = stored.vocab_size
        except BaseException:  # a tokenizer that cannot be read, after a process was started
            engine.close()
            raise

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling: Sampling | None = None,
        *,
        sampling_params: Sampling | None = None,
        use_tqdm: bool = False,
        lora_request: None = None,
        priority: None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts together; returns the results in the order of the prompts. sampling: one for all, or one for
        each; vLLM's name, sampling_params, works too. use_tqdm: accepted, but no bar is shown. lora_request and
        priority, vLLM's, must be None; `start` takes a priority."""
        for name, asked in (("lora_request", lora_request), ("priority", priority)):
            if asked is not None:
                raise ValueError(f"generate: {name}: expected None, got {asked!r}: not implemented")
        asked = _either(sampling, sampling_params)
        asked = self.get_default_sampling_params() if asked is None else asked
        return cast(list[RequestOutput], super().generate(cast(list[Prompt], listed(prompts)), asked))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters used where none are given, with the defaults of the model's generation_config.json (vLLM's
        method)."""
        return SamplingParams(**self.sampling_defaults)

    def encode(self, prompt: AnyPrompt) -> list[int]:
        """The token ids of a prompt. ValueError for a dict without prompt or prompt_token_ids, or with more in it."""
        return super().encode(plain(prompt))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling | None = None,
        *,
        sampling_params: Sampling | None = None,
        use_tqdm: bool = False,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        **options: Any,
    ) -> list[RequestOutput]:
        """The answers to conversations, in the model's chat template: a list, also for one conversation.

        messages: those of one conversation, or a list of several. messages and tools are OpenAI's, see
        `ChatEncoder.chat_text`, also for options. sampling, sampling_params, use_tqdm: see `generate`. tool_choice:
        "auto", or "none": the model is not shown tools. With a tool_call_parser, calls in an answer become its
        `tool_calls`.
        """
        from reference_impl.features.chat.conversation import shown_tools

        shown = shown_tools(tools, tool_choice)
        prompts = [self.chat_prompt(one, shown, **options) for one in conversations(messages)]
        outputs = self.generate(prompts, _either(sampling, sampling_params))
        parser = self.tool_call_parser
        return outputs if not shown or parser is None else [with_all_calls(output, parser) for output in outputs]

    def get_tokenizer(self) -> Any:
        """The tokenizer of `transformers` for the model's folder (vLLM's method; `self.tokenizer` is that of
        `tokenizers`). ImportError without transformers, ValueError for a model without a folder."""
        if self.folder is None:
            raise ValueError(f"{self.where} has no tokenizer")
        if is_gguf(self.folder):
            raise ValueError(f"{self.folder}: get_tokenizer expects a folder; llm.tokenizer is that of the file")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            message = "get_tokenizer needs transformers (pip install transformers); llm.tokenizer does not"
            raise ImportError(message) from None
        return AutoTokenizer.from_pretrained(self.folder)

    def stream(self, prompt: AnyPrompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Yields pieces of text as they become certain. Leaving the loop early aborts the request. RuntimeError if it
        fails (finish_reason "error")."""
        if sampling is not None and sampling.n != 1:
            raise ValueError(f"stream: expected SamplingParams(n=1), got n={sampling.n}: start one stream per sample")
        return super().stream(cast(Prompt, prompt), sampling or self.get_default_sampling_params())

    @functools.cached_property
    def embedding_defaults(self) -> EmbeddingDefaults:
        """How `embed` pools where it is not told."""
        from reference_impl.models.embedding_defaults import embedding_defaults

        return embedding_defaults(self.folder)

    def embed(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], pooling: Pooling | None = None, *, normalize: bool | None = None
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, `outputs.embedding`, [hidden_size] numbers: the mean of its tokens' hidden
        states, or the last one's, scaled to length 1 (as the server's) if normalize. None: as the model's files say
        (`embedding_defaults`). RuntimeError if one fails, ValueError if the files ask for what is not computed."""
        pooling, normalize = self.embedding_defaults.resolve(pooling, normalize)
        requests: list[Request] = []
        try:
            for prompt in listed(prompts):
                requests.append(self.engine.add(self.encode(prompt), pooling=pooling))
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort(request.id)
        return [embedding(request, normalize) for request in requests]

    def beam_search(
        self, prompt: AnyPrompt, width: int = 4, max_tokens: int = 128, length_penalty: float = 1.0
    ) -> list[Beam]:
        """The `width` most probable texts found, best first: see `features/beams/search.py`."""
        from reference_impl.features.beams.search import beam_search

        return beam_search(self.engine, self.encode(prompt), width, max_tokens, length_penalty, self.step)

    def update_weights(self, folder: str | Path) -> None:
        """Replaces the weights by those of another checkpoint of the same model, between two steps: a folder or an id,
        of which only config.json and the tensors are read. Requests go on, and compute what they have anew: see
        `new_weights.py`. While it loads, both fit into memory.

        ValueError or CheckpointError, and nothing has changed, for another model, for files that cannot be read, and
        with what goes on with old keys and values: a page store, a beam search under way.
        """
        from reference_impl.assembly.new_weights import update_weights
        from reference_impl.models.hub import model_folder

        update_weights(self, Path(model_folder(folder)))

    # --- for callers that step the engine: a server, or a notebook that watches --------------------------------------

    def start(self, prompt: AnyPrompt, sampling: SamplingParams, **options: Any) -> Generation:
        """Queues a prompt; returns its sample 0, with the others in `others`. The caller must `leave` it.

        options: those of Engine.add; with `resume` the text goes on behind what was shown of it. ValueError for tokens
        from a model without lm_head, and bad_words without a tokenizer or with a grammar.
        """
        if not self.has_head and options.get("pooling") is None:
            raise ValueError(f"{self.where} has no lm_head, so it gives hidden states and no tokens: use embed")
        if sampling.bad_words:
            if self.tokenizer is None or options.get("grammar") is not None:
                raise ValueError("bad_words: expected a model with a tokenizer, and no grammar beside them")
            from reference_impl.features.grammars.bad_words import BadWords

            config = self.engine.model.config
            options["grammar"] = BadWords(sampling, self.tokenizer, config.vocab_size, config.eos_token_ids)
        first = cast(Generation, super().start(cast(Prompt, prompt), sampling, **options))
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        first.prompt = text if isinstance(text, str) else None
        if (resume := options.get("resume")) is not None:
            self._replay(first, resume.num_unstreamed)
        names = [f"{first.request.id}/{i}" for i in range(1, sampling.n)]
        first.others = [self.follow(self.engine.requests[name]) for name in names]
        return first

    def _replay(self, generation: Generation, num_unstreamed: int) -> None:
        try:
            generation.replay(num_unstreamed)
        except BaseException:
            self.leave(generation)
            raise

    def follow(self, request: Request) -> Generation:
        try:
            self._live[request.id] = generation = Generation(self, request)
        except BaseException:  # the prompt's tokens have no text: nothing would ever leave the request
            self.engine.abort(request.id)
            raise
        return generation

    def step(self, submit: bool = True) -> StepResult:
        """Runs one step of the engine: see `core.llm`.

        Ctrl-C waits for its end: after an interrupted step neither the engine nor the other requests could go on.
        """
        with _uninterrupted():
            return super().step(submit)

    def leave(self, generation: core_llm.Generation) -> None:
        """Drops a request with its other samples; those not finished are aborted and their blocks are freed now."""
        for other in cast(Generation, generation).others:
            super().leave(other)
        super().leave(generation)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, a step: interrupted in the middle, neither the engine nor the other
    requests could go on. Pressed twice, it is raised at once. With another handler installed, or outside the main
    thread, nothing changes."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _config_with(options: Mapping[str, Any]) -> EngineConfig:
    """The config for options under our names and vLLM's."""
    if not options:
        return EngineConfig()
    from reference_impl.assembly.names import options_of

    return EngineConfig(**options_of(options, [*inspect.signature(LLM).parameters][:-1]))


def _either(sampling: Sampling | None, sampling_params: Sampling | None) -> Sampling | None:
    if sampling is not None and sampling_params is not None:
        raise TypeError("sampling and sampling_params are the same: leave one out")
    return sampling_params if sampling is None else sampling


def _elsewhere(
    model: str | Path | None, dtype: torch.dtype, device: torch.device, config: EngineConfig, parts: Parts | None,
    quantization: Quantizations, draft: Path | None, threads: bool,
) -> Engine:  # fmt: skip
    """An engine whose model computes in another process, or in ranks."""
    from reference_impl.assembly.draft_folder import parts_with_draft
    from reference_impl.assembly.ranks import ranked_engine
    from reference_impl.assembly.split import split_engine

    if model is None:
        what = "several ranks" if config.is_divided else "worker='process'"
        raise ValueError(f"{what}: a worker loads its model from a folder: expected one, got dummy_weights")
    name, make_parts = str(dtype).removeprefix("torch."), None
    if draft is not None:
        make_parts = partial(parts_with_draft, draft, dtype, device, config)
    options: dict[str, Any] = {
        "dtype": name, "device": str(device), "parts": parts, "make_parts": make_parts, "quantization": quantization,
    }  # fmt: skip
    if config.is_divided:
        return ranked_engine(Path(model), config, ranks="threads" if threads else "processes", **options)
    return split_engine(Path(model), config, **options)


def _config_of(model: str | Path | None, shape: Shape | None, dummy_weights: bool) -> ModelConfig:
    if model is not None and shape is None and not dummy_weights:
        return read_config(model, quantized=True)  # load_model says what it cannot read
    if model is None and shape is not None and dummy_weights:
        from reference_impl.models.shapes import config_of_shape

        return config_of_shape(shape)
    if model is None and shape is not None:
        raise ValueError(
            "LLM(shape=...): a shape has no weights. Pass dummy_weights=True for random ones, whose tokens mean "
            "nothing, or the folder of a model instead"
        )
    raise ValueError(
        "LLM: expected the folder of a model, or shape=... and dummy_weights=True, got "
        f"model={None if model is None else str(model)!r}, shape={shape!r}, dummy_weights={dummy_weights}"
    )
