"""What it costs that one engine computes a prompt and another one answers.

    inferlab bench disaggregation [--rounds 5] [--quick] [--save]

Pages first, see `page_path.py`: from one cache into another beside one copy of their bytes; NIXL under our transport
beside NIXL alone. Then requests, to engines in processes of their own, one for prompts and one for answers:

    first token     of one request, beside what it is made of: the prompt's steps in an engine of this process, its
                    pages' bytes at the rate of the link, and a step of decoding, all measured in this run
    hidden          the share of the pages' time on a slow link that passes while the prompt is computed. The link is a
                    transport that sleeps by bytes (`slow_link.py`), at a rate that takes half the prompt's time
    gaps            between tokens of streams that run when a burst of prompts comes, beside one engine with as many
                    threads as these two, which computes prompts in chunks

The course model, and a model of 26 million random weights for prompts of 2,048 tokens. With less than two idle cores
the figures say little; processor time says more then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.bench import harness, page_path, parallel
from reference_impl.bench.slow_link import SlowTransport
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.interfaces import SamplingParams
from reference_impl.interfaces.pages import PAGE_TOKENS
from reference_impl.serving.disaggregated import Disaggregated
from reference_impl.serving.peers import endpoint_of, load_peer
from reference_impl.serving.runner import EngineHost, Runner
from reference_impl.serving.supervision import Restarts, SupervisedEngine
from reference_impl.serving.worker import load

if TYPE_CHECKING:
    from reference_impl.assembly.llm import LLM

NAME = "disaggregation"
GOALS = {"page path": 0.25, "nixl": 0.8, "first token": 1.15, "hidden": 0.7}
RANDOM = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
          "num_key_value_heads": 4, "max_position_embeddings": 4096}  # fmt: skip
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is measured. prompt: tokens for the model of random weights; short: for the course model. chunk: tokens
    of a step. streams, burst: requests that decode, and prompts of burst_prompt tokens that come then."""

    path: page_path.Shape = page_path.SHAPE
    nixl: tuple[int, ...] = (8 * MIB, 32 * MIB, 128 * MIB)
    nixl_page: int = MIB // 2
    random: tuple[tuple[str, int], ...] = tuple(RANDOM.items())
    prompt: int = 2048
    short: int = 1000
    chunk: int = 256
    streams: int = 4
    burst: int = 6
    burst_prompt: int = 800
    answer: int = 160


QUICK = Sizes(
    path=page_path.Shape(2, 2, 32, 16, 8), nixl=(8 * MIB,), prompt=256, short=160, chunk=64, burst=2, burst_prompt=100,
    answer=24, random=tuple({**RANDOM, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}.items()),
)  # fmt: skip


# --- engines ----------------------------------------------------------------------------------------------------------


def load_slow(model: Path, rate: float, **options: Any) -> LLM:
    """An engine that pushes pages no faster than so many bytes a second."""
    llm = load_peer(model, **options)
    endpoint = endpoint_of(llm)
    endpoint.transport = SlowTransport(endpoint.transport, rate)
    return llm


def _engines(*makes: Any) -> list[SupervisedEngine]:
    return [SupervisedEngine(make, ChatEncoder(None), Restarts()) for make in makes]


def two_engines(model: Path, rate: float | None = None, **options: Any) -> EngineHost:
    """One for prompts and one for answers, with half of the threads each. rate: of the link, in bytes a second."""
    slow = partial(load_peer, model, num_engines=2, **options)
    if rate is not None:
        slow = partial(load_slow, model, rate, num_engines=2, **options)
    return Disaggregated(_engines(slow, partial(load_peer, model, num_engines=2, **options)), 1)


def one_engine(model: Path, **options: Any) -> EngineHost:
    return _engines(partial(load, model, **options))[0]


def prompt_of(turn: int, length: int) -> list[int]:
    """Tokens that no other turn has, so that nothing is cached."""
    return random.Random(turn).choices(range(16, 516), k=length)


def greedy(num: int) -> SamplingParams:
    return SamplingParams(max_tokens=num, temperature=0, ignore_eos=True, detokenize=False)


@dataclass
class Answer:
    """When a request's tokens came, (seconds since it was sent, how many), and how many of its prompt were there."""

    tokens: list[tuple[float, int]]
    num_cached: int


async def answer(runner: Runner, name: str, prompt: Sequence[int], num: int) -> Answer:
    began, found = time.perf_counter(), list[tuple[float, int]]()
    stream = await runner.start(name, [prompt], greedy(num))
    try:
        async for pieces in stream:
            found.append((time.perf_counter() - began, sum(len(piece.tokens) for piece in pieces)))
    finally:
        stream.close()
    return Answer(found, stream.usage.cached)


async def first_token(runner: Runner, turn: int, length: int) -> float:
    """Seconds until it came. RuntimeError if the prompt's pages did not come before it."""
    found = await answer(runner, f"turn-{turn}", prompt_of(turn, length), 1)
    if turn > 1 and found.num_cached < (whole := (length - 1) // PAGE_TOKENS * PAGE_TOKENS):
        raise RuntimeError(f"of {whole} tokens in pages {found.num_cached} came: the rest was computed anew")
    return found.tokens[0][0]


def steps_of(engine: Engine, prompt: Sequence[int]) -> tuple[float, float]:
    """Seconds of a prompt's steps, and of a step of decoding (median), of an engine that does nothing else."""
    request, seconds = engine.add(list(prompt), greedy(8)), list[tuple[bool, float]]()
    while request.finish_reason is None:
        is_prompt, began = not request.output_tokens, time.perf_counter()
        engine.step()
        seconds.append((is_prompt, time.perf_counter() - began))
    prompt_seconds = sum(each for is_prompt, each in seconds if is_prompt)
    return prompt_seconds, statistics.median(each for is_prompt, each in seconds if not is_prompt)


async def started(stack: AsyncExitStack, host: EngineHost) -> Runner:
    runner = Runner(host, max_unfinished=1 << 20)
    await runner.begin()
    stack.push_async_callback(runner.end, 5.0)
    while isinstance(host, Disaggregated) and len(host.names) < len(host.engines):
        await asyncio.sleep(0.01)
    return runner


# --- what is measured -------------------------------------------------------------------------------------------------


async def prompts(model: Path, length: int, rounds: int, chunk: int, slow_too: bool) -> dict[str, Any]:
    """Of a prompt: the first token's time, and with slow_too what share of a slow link's time is hidden."""
    options: dict[str, Any] = {"max_num_batched_tokens": chunk, "num_blocks": 4 * (length // 16 + 8)}
    alone = Engine(load_model(model), EngineConfig(prefix_cache="off", overlap="off", **options))
    page_bytes, num_pages = alone.kv_spec.bytes_per_block, (length - 1) // PAGE_TOKENS
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # as the engines beside it have
    try:
        async with AsyncExitStack() as stack:
            stack.callback(alone.close)
            usual = steps_of(alone, prompt_of(0, length))[0]
            rate = page_path.link_rate(rounds, num_pages, page_bytes)
            slow_rate = num_pages * page_bytes / (usual / 2)
            runner = await started(stack, two_engines(model, **options))
            slow = await started(stack, two_engines(model, slow_rate, **options)) if slow_too else None
            parts = list[tuple[float, float, float]]()  # prompt, decoding, first token
            hidden = list[float]()
            for turn in range(1, rounds + 2):
                prefill, decode = steps_of(alone, prompt_of(turn, length))
                first = await first_token(runner, turn, length)
                if turn > 1:
                    parts.append((prefill, decode, first))
                if slow is not None:
                    late = await first_token(slow, turn, length) - first
                    if turn > 1:
                        hidden.append(1 - late / (num_pages * page_bytes / slow_rate))
    finally:
        torch.set_num_threads(threads)
    link, names = num_pages * page_bytes / rate, ("prefill", "decode", "first")
    medians = {name: statistics.median(each) for name, each in zip(names, zip(*parts, strict=True), strict=True)}
    ratios = [first / (prefill + link + decode) for prefill, decode, first in parts]
    found = {"tokens": length, "bytes": num_pages * page_bytes, "link_bytes_per_s": rate, "seconds": medians,
             "of_its_parts": harness.spread(ratios)}  # fmt: skip
    return found | ({"slow_bytes_per_s": slow_rate, "hidden": harness.spread(hidden)} if hidden else {})


def gaps(streams: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """Seconds between a stream's tokens: of tokens that came together, their share."""
    return [
        (now - before) / num for stream in streams for (before, _), (now, num) in pairwise(stream) for _ in range(num)
    ]


async def burst(runner: Runner, turn: int, sizes: Sizes) -> float:
    """The 99th percentile of the gaps of streams that run when a burst of prompts comes, in seconds."""
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(answer(runner, f"run-{turn}-{n}", prompt_of(10_000 + 100 * turn + n, 24), sizes.answer))
            for n in range(sizes.streams)
        ]
        await asyncio.sleep(0.2)
        for n in range(sizes.burst):
            prompt = prompt_of(20_000 + 100 * turn + n, sizes.burst_prompt)
            group.create_task(answer(runner, f"burst-{turn}-{n}", prompt, 2))
    return sorted(gaps([task.result().tokens for task in running]))[-1 - sizes.streams * sizes.answer // 100]


async def bursts(model: Path, rounds: int, sizes: Sizes) -> dict[str, Any]:
    options: dict[str, Any] = {"max_num_batched_tokens": sizes.chunk, "num_blocks": 2000}
    found: dict[str, list[float]] = {"one": [], "two": []}
    async with AsyncExitStack() as stack:
        runners = {"one": await started(stack, one_engine(model, **options)),
                   "two": await started(stack, two_engines(model, **options))}  # fmt: skip
        for turn in range(rounds + 1):
            for name in harness.rotated(list(runners), turn):
                p99 = await burst(runners[name], turn, sizes)
                if turn:
                    found[name].append(p99)
    return {"one_p99_s": harness.spread(found["one"]), "two_p99_s": harness.spread(found["two"]),
            "times_shorter": harness.ratio(found["one"], found["two"])}  # fmt: skip


def run(rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Measures all of it; returns a stamped result."""
    if (os.cpu_count() or 1) < 2:
        return {"not_measured": "two engines need two cores"}
    result: dict[str, Any] = {"stamp": harness.stamp(), "rounds": rounds}
    result["page_path"] = page_path.page_path(2 * rounds + 1, sizes.path)
    result["nixl"] = page_path.nixl(2 * rounds + 1, sizes.nixl, sizes.nixl_page)
    course = course_model("target")
    result["course"] = asyncio.run(prompts(course, sizes.short, rounds, sizes.chunk, slow_too=False))
    with tempfile.TemporaryDirectory() as folder:
        parallel.make_model(Path(folder), **dict(sizes.random))
        result["random"] = asyncio.run(prompts(Path(folder), sizes.prompt, rounds, sizes.chunk, slow_too=True))
    result["burst"] = asyncio.run(bursts(course, rounds, sizes))
    return result


# --- what is said of it -----------------------------------------------------------------------------------------------


def _both(row: dict[str, dict[str, float]]) -> str:
    return f"{harness.times(row['clock'])}, by processor time {harness.times(row['processor'])}"


def lines(result: dict[str, Any]) -> list[str]:
    """The figures as lines for a terminal."""
    if "not_measured" in result:
        return [result["not_measured"]]
    path, nixl, burst = result["page_path"], result["nixl"], result["burst"]
    said = [
        f"page path over shared memory, {path['bytes'] / 1e6:.0f} MB, of one copy's speed: {_both(path['of_a_copy'])} "
        f"(goal {GOALS['page path']:.2f})"
    ]
    if "not_measured" in nixl:
        said.append(f"NIXL: not measured: {nixl['not_measured']}")
    for size, row in nixl.get("of_bare", {}).items():
        said.append(f"our NIXL, {int(size) >> 20} MiB, of bare NIXL's speed: {_both(row)} (goal {GOALS['nixl']})")
    for name in ("course", "random"):
        row, seconds = result[name], result[name]["seconds"]
        said.append(
            f"{name} model, {row['tokens']:,} tokens, {row['bytes'] / 1e6:.1f} MB of pages: first token "
            f"{harness.times(row['of_its_parts'])} of its parts (goal {GOALS['first token']}): "
            f"prefill {seconds['prefill'] * 1e3:.0f} ms, link {row['bytes'] / row['link_bytes_per_s'] * 1e3:.1f}, "
            f"a step {seconds['decode'] * 1e3:.1f}; it came after {seconds['first'] * 1e3:.0f}"
        )
        if "hidden" in row:
            hidden = row["hidden"]
            said.append(
                f"  over a link of {row['slow_bytes_per_s'] / 1e6:.1f} MB/s, half the prefill's time: "
                f"{hidden['median']:.0%} of it hidden ({hidden['min']:.0%} to {hidden['max']:.0%}; "
                f"goal {GOALS['hidden']:.0%})"
            )
    said.append(
        f"p99 of gaps between tokens under a burst of prompts: one engine {burst['one_p99_s']['median'] * 1e3:.0f} ms, "
        f"two {burst['two_p99_s']['median'] * 1e3:.0f} ms, {harness.times(burst['times_shorter'])} shorter"
    )
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"inferlab bench {NAME}")
    parser.add_argument("--rounds", type=harness.positive, default=5, help="interleaved runs of each candidate: 5")
    parser.add_argument("--quick", action="store_true", help="small sizes: that it works, no figure to go by")
    parser.add_argument("--save", action="store_true", help=f"write reference_impl/bench/results/{NAME}.json")
    options = parser.parse_args(arguments)
    if options.quick and options.save:
        parser.error("--quick says nothing about speed: leave it out to save a result")
    result = run(options.rounds, QUICK if options.quick else Sizes())
    print("\n".join(lines(result)))
    if options.save and "not_measured" not in result:
        print(f"wrote {harness.save(NAME, result)}")
    return int("not_measured" in result)
