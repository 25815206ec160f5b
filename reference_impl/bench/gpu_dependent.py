"""Do dependent launches pay on this GPU? A chain of real steps with and without, in a separate process: a chain that
hangs, or breaks the GPU's state, costs that process and nothing else.

The result decides whether the engines of the GPU bench use them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.bench.gpu_engines import BLOCK_SIZE, DEPENDENT, Bench
from reference_impl.bench.gpu_rows import Row
from reference_impl.interfaces import SamplingParams
from reference_impl.models.shapes import SHAPES

ROWS = ("dependent launches, 8 layers as of qwen3-0.6b, one stream",)
SECONDS = 80.0  # of the process: it imports torch and compiles kernels, which the engines then find compiled
LAYERS, NEW_TOKENS, TURNS = 8, 96, 5


def dependent(bench: Bench) -> Iterator[Row]:
    """How many times as fast a step is with them; and from now on `bench` makes engines accordingly."""
    choice = bench.configurations[DEPENDENT] = {"use": False, "options": {}}
    if bench.device.type != "cuda":
        yield Row(ROWS[0], problem="left out: only a GPU has them")
        return
    safe = ["-P"] * sys.flags.safe_path
    command = [sys.executable, *safe, "-m", "reference_impl.bench.gpu_dependent"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        yield Row(ROWS[0], problem=f"left out: the process that tried them took more than {SECONDS:.0f} s")
        return
    if child.returncode:
        said = (child.stderr.strip().splitlines() or [f"status {child.returncode}"])[-1]
        yield Row(ROWS[0], problem=f"left out, they are not used: {said}"[:300])
        return
    found = json.loads(child.stdout.splitlines()[-1])
    gains = [off / on for off, on in zip(found["off"], found["on"], strict=True)]
    choice |= found | {"use": statistics.median(gains) > 1}
    used = "used" if choice["use"] else "not used"
    yield Row(ROWS[0], "times as fast", harness.spread(gains), note=f"same tokens; {used} below", detail=found)


def main() -> None:
    """Prints {"off": [seconds of a step], "on": [...]}."""
    shape = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": LAYERS}
    engines = {
        name: LLM(
            shape=shape, dummy_weights=True, dtype="bfloat16", device="cuda", block_size=BLOCK_SIZE, num_blocks=64,
            max_num_seqs=4, max_model_len=2048, prefix_cache="off", dependent_launches=name,
        )
        for name in ("off", "on")
    }  # fmt: skip
    for llm in engines.values():
        all_that_can_be_fused(llm)
    print(json.dumps(in_turns(engines, 256, NEW_TOKENS, TURNS)))


def all_that_can_be_fused(llm: LLM) -> None:
    """Fuses everything without measuring: of two ways that take about as long, two engines may choose differently.
    Each way rounds differently, and near-ties would give other tokens, which are not the fault of the launches."""
    model: Any = llm.engine.model
    model.tune = lambda num_tokens: None


def in_turns(engines: dict[str, LLM], prompt_tokens: int, new_tokens: int, turns: int) -> dict[str, list[float]]:
    """Seconds per token of each engine in each turn, after a first turn that captures. RuntimeError where the greedy
    tokens are not the same."""
    prompt = [[(7 * i) % 10_000 for i in range(prompt_tokens)]]
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    expected: list[int] | None = None
    for turn, (name, llm) in itertools.product(range(turns + 1), engines.items()):
        began = time.perf_counter()
        [output] = llm.generate(prompt, sampling)
        if turn:
            seconds[name].append((time.perf_counter() - began) / new_tokens)
        expected = output.token_ids if expected is None else expected
        if output.token_ids != expected:
            raise RuntimeError(f"dependent launches {name!r}, turn {turn}: other tokens than at first")
    return seconds


if __name__ == "__main__":
    main()
