"""What the host does in a step, around a model that computes nothing: schedule, plan the message, lay out the batch,
sample greedily from logits that are already there, update the requests.

Processor seconds of this process, so that other work on the machine does not count; per step the median. In all steps
all requests decode. Beside them the size of a step's message, pickled.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.bench import harness
from reference_impl.interfaces import Batch, SamplingParams, Step, Transfers
from reference_impl.simulation.executor import hollow_model

VOCAB_SIZE, BLOCK_SIZE, STEPS = 512, 16, 60
# (requests, tokens of each, penalties)
CASES = ((1, 500, False), (16, 500, False), (256, 500, False), (256, 8000, False), (64, 2000, True))


class _Hollow:
    """A model of no layers, with the cache and the attention that it does not need."""

    def __init__(self, rows: int):
        model = hollow_model(VOCAB_SIZE, 16_384, 64)
        self.config, self.rotary = model.config, model.rotary
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.logits = torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def __call__(self, batch: Batch, kv_cache: Any, attention: Any) -> Tensor:
        return self.logits[: len(batch.logits_indices)]

    def transfer(self, transfers: Transfers) -> None:
        pass

    def unused(self, *_: Any) -> Any:
        raise AssertionError("a model without layers writes, reads and attends to nothing")

    write = layer = plan = forward = unused


def measure(rows: int, length: int, penalties: bool, steps: int = STEPS) -> dict[str, float]:
    """Microseconds of a step and of its parts, and the bytes of its message; medians over `steps` steps."""
    model: Any = _Hollow(rows)
    blocks = rows * (-(-(length + steps + 2) // BLOCK_SIZE) + 1)
    config = EngineConfig(
        num_blocks=blocks, block_size=BLOCK_SIZE, max_num_seqs=rows, max_num_batched_tokens=rows * length,
        prefix_cache="off", overlap="off",
    )  # fmt: skip
    engine = Engine(model, config, Parts(attention=model, kv_cache=model))
    params = SamplingParams(
        max_tokens=steps + 10, temperature=0, ignore_eos=True, presence_penalty=0.5 if penalties else 0.0
    )
    for i in range(rows):
        engine.add([i % VOCAB_SIZE] * length, params)
    engine.step()
    spent = dict.fromkeys(("schedule", "plan", "submit", "update"), 0.0)
    messages: list[Step] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.process_time()
            found = call(*arguments)
            spent[name] += time.process_time() - began
            if name == "plan":
                messages.append(found)
            return found

        return run

    parts: Any = (engine.scheduler, engine.planner, engine.executor)
    scheduler, planner, executor = parts
    scheduler.schedule, scheduler.update = (timed(name, getattr(scheduler, name)) for name in ("schedule", "update"))
    planner.step, executor.submit = timed("plan", planner.step), timed("submit", executor.submit)
    found: dict[str, list[float]] = {name: [] for name in ("step", *spent)}
    for _ in range(steps):
        spent.update(dict.fromkeys(spent, 0.0))
        began = time.process_time()
        engine.step()
        found["step"].append(time.process_time() - began)
        for name, seconds in spent.items():
            found[name].append(seconds)
    result = {f"{name}_us": statistics.median(seconds) * 1e6 for name, seconds in found.items()}
    return {**result, "message_bytes": statistics.median(len(pickle.dumps(step)) for step in messages)}


def run(rounds: int) -> dict[str, Any]:
    """Measures all cases in each round; takes seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = [[measure(*case) for case in CASES] for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    cases = {}
    for i, (rows, length, penalties) in enumerate(CASES):
        name = f"{rows} x {length:,} tokens{', penalties' * penalties}"
        cases[name] = {key: harness.spread([each[i][key] for each in measured]) for key in measured[0][i]}
    return {"stamp": harness.stamp(), "rounds": rounds, "steps": STEPS, "cases": cases}


def table(result: Mapping[str, Any]) -> list[str]:
    names = ("step_us", "schedule_us", "plan_us", "submit_us", "update_us", "message_bytes")
    lines = ["requests x context".ljust(32) + "".join(name.replace("_", " ").rjust(16) for name in names)]
    for name, case in result["cases"].items():
        lines.append(name.ljust(32) + "".join(f"{case[key]['median']:16,.0f}" for key in names))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("host", 3, run, table, arguments)
