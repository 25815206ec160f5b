"""What the server costs over the engine: the same requests given to the engine, and streamed through HTTP.

The client is a process of its own that reads bytes and counts events. Engine, server and client share the processors
of this machine, as they do when a learner serves on a laptop; a client elsewhere would cost less.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

from reference_impl.bench import harness
from reference_impl.config import course_model
from reference_impl.engine import Parts
from reference_impl.interfaces import SamplingParams
from reference_impl.llm import LLM
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.metrics import WatchedTrace
from reference_impl.serving.server import TRACE_EVENTS, ModelServer

NUM_STREAMS, NEW_TOKENS = 32, 128

# Answers one line on standard input with one on standard output: seconds, events.
CLIENT = """
import asyncio, json, sys, time

async def one(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
    writer.write("\\r\\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    data = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in data, data[-500:]
    return data.count(b"\\ndata: ")

async def everybody(port, bodies):
    return sum(await asyncio.gather(*(one(port, body) for body in bodies)))

port, bodies = int(sys.argv[1]), [json.dumps(body).encode() for body in json.loads(sys.stdin.readline())]
for _ in sys.stdin:
    began = time.perf_counter()
    events = asyncio.run(everybody(port, bodies))
    print(time.perf_counter() - began, events, flush=True)
"""


def run(rounds: int) -> dict[str, Any]:
    """Interleaved rounds; a stamped result with the ratio server / engine."""
    stamp = harness.stamp()
    alone = LLM(course_model("target"), prefix_cache="off")
    parts = Parts(trace=WatchedTrace(TRACE_EVENTS))
    served = ModelServer(
        LLM(course_model("target"), parts=parts, prefix_cache="off"), ServerConfig("target"), "127.0.0.1", 0
    )
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
    measured: dict[str, list[float]] = {"engine": [], "server": []}
    events = 0

    def through_http() -> float:
        nonlocal events
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        seconds, number = client.stdout.readline().split()
        events = int(number)
        return float(seconds)

    def directly() -> float:
        began = time.perf_counter()
        alone.generate(prompts, sampling)
        return time.perf_counter() - began

    try:
        for turn in range(rounds + 1):  # the first warms up
            for name, measure in (("engine", directly), ("server", through_http))[:: 1 if turn % 2 else -1]:
                taken = measure()
                if turn:
                    measured[name].append(taken)
    finally:
        client.stdin.close()
        client.wait()
        served.stop()
        thread.join()
    return {
        "stamp": stamp,
        "rounds": rounds,
        "streams": NUM_STREAMS,
        "new_tokens": NEW_TOKENS,
        "events": events,
        "tokens_per_second": {
            name: harness.spread([NUM_STREAMS * NEW_TOKENS / s for s in values]) for name, values in measured.items()
        },
        "server_over_engine": harness.ratio(measured["server"], measured["engine"]),
    }


def table(result: dict[str, Any]) -> str:
    over, speed = result["server_over_engine"], result["tokens_per_second"]
    return (
        f"{result['streams']} streams of {result['new_tokens']} tokens: engine {speed['engine']['median']:.0f} "
        f"tokens/s, through the server {speed['server']['median']:.0f}; time server / engine {over['median']:.3f} "
        f"({over['min']:.3f}-{over['max']:.3f})"
    )
