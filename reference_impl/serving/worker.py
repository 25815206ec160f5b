"""The engine's side of the server: runs commands between steps, and sends each step's results (see runner.py)."""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import SamplingParams
from reference_impl.serving.metrics import WatchedTrace
from reference_impl.serving.questions import Questions
from reference_impl.serving.runner import Message

if TYPE_CHECKING:
    from reference_impl.assembly.llm import LLM, Generation
    from reference_impl.interfaces.pages import PageStore

logger = logging.getLogger("inferlab.serving")
TRACE_EVENTS = 20_000  # that a server keeps


def load(
    model: Path,
    dtype: str | None = None,
    num_engines: int = 1,
    page_store: PageStore | None = None,
    **engine_options: Any,
) -> LLM:
    """Loads an LLM with a WatchedTrace. num_engines: how many share this machine's cores. Raises ValueError or OSError
    where the folder or the options are wrong."""
    import torch  # which the process of the event loop does without

    from reference_impl.assembly.llm import LLM

    if num_engines > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_engines))
    parts = Parts(trace=WatchedTrace(TRACE_EVENTS), page_store=page_store)
    llm = LLM(model, dtype=dtype, parts=parts, **engine_options)
    began = time.monotonic()
    if captured := llm.engine.capture_graphs():  # before the first request
        logger.info("%d CUDA graphs captured in %.0f s", captured, time.monotonic() - began)
    return llm


def freeze() -> None:
    """Keeps what exists now for the life of the process: the garbage collector need not scan it again and again, which
    takes a tenth of a second each time."""
    gc.collect()
    gc.freeze()


class Commands(Protocol):
    def get(self, block: bool) -> Message | None:
        """The next command; None: the end. Raises queue.Empty where there is none and `block` is false."""
        ...


@dataclass
class _Sample:
    generation: Generation
    first: Generation  # sample 0 of the same prompt
    stream: int
    index: int
    sent: int = 0  # tokens

    def news(self) -> Message | None:
        """The number of the stream and the fields of a `Piece`; None where there is nothing new."""
        request = self.generation.request
        prompt = None
        if not self.sent and (first := self.first.request).sampling.prompt_logprobs is not None:
            prompt = list(first.prompt_logprobs)
        tokens = request.output_tokens[self.sent :]
        logprobs = request.logprobs[self.sent :] if request.logprobs else []
        self.sent += len(tokens)
        text, finish_reason = self.generation.take(), self.generation.finish_reason
        why = (self.generation.stop_reason, self.generation.cut_by) if finish_reason is not None else (None, None)
        something = text or tokens or finish_reason is not None
        embedding = request.embedding if request.pooling is not None else None
        new = self.stream, self.index, text, tokens, logprobs, finish_reason, embedding, *why, prompt, request.error
        return new if something else None


class Worker:
    """Runs an LLM's engine, which nothing else uses."""

    def __init__(self, llm: LLM, commands: Commands, report: Callable[[Message], None]):
        self.llm, self._commands, self._report = llm, commands, report
        self._questions = Questions(llm.engine)
        self._streams: dict[int, list[Generation]] = {}  # sample 0 of each prompt
        self._samples: dict[str, _Sample] = {}  # by request id
        self._failed = False

    def run(self) -> None:
        try:
            while self._obey():
                if self.llm.engine.has_work():
                    self._step()
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.exception("a step has failed")
            self._failed = True
            self._report(("failed", f"{type(error).__name__}: {error}"))
            while self._obey():  # questions about past steps are still answered
                pass
        finally:
            self.llm.engine.close()

    def _obey(self) -> bool:
        """Runs the commands that have come; waits for one where there is nothing to compute. False: the end."""
        while True:
            try:
                command = self._commands.get(block=self._failed or not self.llm.engine.has_work())
            except queue.Empty:
                return True
            match command:
                case None:
                    return False
                case "start", number, *request:
                    refusal = self._start(number, *request)
                    seeds = [first.request.seed for first in self._streams.get(number, ())]
                    self._report(("answer", number, seeds, refusal))
                case "leave", number:
                    self._leave(number)
                case "ask", number, name, arguments:
                    self._report(("answer", number, *self._questions.answer(name, arguments)))

    def _start(
        self,
        number: int,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        options: dict[str, Any],
    ) -> str | None:
        """Starts a request's samples. Returns why the engine refuses, or None; samples that were started before a
        refusal are aborted when the stream is closed."""
        if self._failed:
            return "the engine has failed"
        firsts = self._streams[number] = []
        try:
            for p, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{p}"
                firsts.append(first := self.llm.start(prompt, sampling, request_id=name, **options))
                for s, sample in enumerate((first, *first.others)):
                    sent = sample.request.num_resumed_tokens
                    self._samples[sample.request.id] = _Sample(sample, first, number, p * sampling.n + s, sent)
        except ValueError as error:
            return str(error)
        except BaseException as error:  # of this request alone, as a tokenizer that cannot say its prompt's last words
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.exception("request %s cannot be started", request_id)
            return f"the request cannot be started: {type(error).__name__}: {error}"
        return None

    def _leave(self, number: int) -> None:
        for first in self._streams.pop(number, ()):
            for sample in (first, *first.others):
                self._samples.pop(sample.request.id, None)
            if not self._failed:
                self.llm.leave(first)

    def _step(self) -> None:
        result = self.llm.step()
        rows, usages = [], []
        pooled = [request.id for request in result.finished if request.pooling is not None]
        for request_id in (*result.tokens, *pooled):
            sample = self._samples.get(request_id)
            if sample is None:
                continue
            if (news := sample.news()) is not None:
                rows.append(news)
            if sample.generation.finish_reason is not None:
                del self._samples[request_id]
                usages.append((sample.stream, _usage(self._streams[sample.stream])))
        self._report(("step", rows, usages))


def _usage(firsts: Sequence[Generation]) -> tuple[int, int, int]:
    """The fields of a `Usage`."""
    requests = [first.request for first in firsts]
    samples = [sample.request for first in firsts for sample in (first, *first.others)]
    return (
        sum(r.num_prompt_tokens for r in requests),
        sum(len(r.output_tokens) for r in samples),
        sum(min(r.num_cached_tokens, r.num_prompt_tokens) for r in requests),
    )
