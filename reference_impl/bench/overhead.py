"""What the server costs over the engine: the same requests given to the engine, and streamed through HTTP.

The served engine is a separate process, like that of `inferlab serve`; so is the client, which reads bytes and counts
events. They share the processors of this machine, as they do when a learner serves on a laptop. With the engine on one
of two processors, server and client have the other, as they have beside an engine that computes on a GPU.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.interfaces import SamplingParams
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.process import EngineProcess
from reference_impl.serving.server import ModelServer
from reference_impl.serving.worker import load

NUM_STREAMS, NEW_TOKENS = 32, 128

# Answers one line on standard input with one on standard output: the number of events.
CLIENT = """
import asyncio, json, sys

async def one(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json"]
    writer.write("\\r\\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    data = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in data, data[-500:]
    return data.count(b"\\ndata: ")

async def everybody(port, bodies):
    return sum(await asyncio.gather(*(one(port, body) for body in bodies)))

port, bodies = int(sys.argv[1]), [json.dumps(body).encode() for body in json.loads(sys.stdin.readline())]
for _ in sys.stdin:
    print(asyncio.run(everybody(port, bodies)), flush=True)
"""


def run(rounds: int) -> dict[str, Any]:
    """A stamped result with ratios server / engine: interleaved rounds, the engine on all processors and on one."""
    threads = torch.get_num_threads()
    try:
        measured = [_measured(rounds, n) for n in sorted({threads, 1}, reverse=True)]
    finally:
        torch.set_num_threads(threads)
    return {
        "stamp": harness.stamp(), "rounds": rounds, "streams": NUM_STREAMS, "new_tokens": NEW_TOKENS,
        "engine_on": measured,
    }  # fmt: skip


def _load(threads: int) -> LLM:
    torch.set_num_threads(threads)
    return load(course_model("target"), prefix_cache="off")


def _measured(rounds: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    alone = LLM(course_model("target"), prefix_cache="off")
    engine = EngineProcess(functools.partial(_load, threads), alone)
    served = ModelServer(engine, ServerConfig("target"), "127.0.0.1", 0)
    prompts = [f"def f{i}(x):\n    " for i in range(NUM_STREAMS)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    bodies = [
        {"prompt": p, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True} for p in prompts
    ]
    thread = threading.Thread(target=served.run)
    thread.start()
    words = [sys.executable, "-c", CLIENT, str(served.port)]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    client.stdin.write(json.dumps(bodies) + "\n")
    events = 0

    def through_http() -> None:
        nonlocal events
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        events = int(client.stdout.readline())

    try:
        taken = harness.interleave(
            {"engine": lambda: alone.generate(prompts, sampling), "server": through_http}, rounds
        )  # fmt: skip
    finally:
        client.stdin.close()
        client.wait()
        served.stop()
        thread.join()
    tokens = NUM_STREAMS * NEW_TOKENS
    return {
        "threads": threads,
        "events": events,
        "tokens_per_second": {name: harness.spread([tokens / s for s in values]) for name, values in taken.items()},
        "server_over_engine": harness.ratio(taken["server"], taken["engine"]),
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['streams']} streams of {result['new_tokens']} tokens: time through the server / engine alone"]
    for found in result["engine_on"]:
        over, speed = found["server_over_engine"], found["tokens_per_second"]
        lines.append(
            f"engine on {found['threads']} threads: {harness.times(over, 3)}; "
            f"{speed['engine']['median']:.0f} tokens/s alone, {speed['server']['median']:.0f} through the server"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("overhead", 5, run, table, arguments)
