"""What dividing a model among two ranks gains on this machine, and what ranks say to each other costs.

    inferlab bench parallel [--rounds 5] [--save]

Engines take turns, each with a model of hidden size 2048 and 8 layers (random weights, float32): one process with one
thread, two ranks with one thread each, and one process with two threads. Beside them stands what two processes with a
model each reach together, which is the most that the machine's memory gives. A prompt of 512 tokens, then 24 tokens.

All-reduces of two processes: memory that both map, beside gloo's over loopback, in turns. Ratios only: more than 1 is
faster. With less than two idle cores the figures say nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.assembly.split import split_engine
from reference_impl.bench import harness
from reference_impl.features.parallel.shared_memory import Board, SharedMemoryRank
from reference_impl.interfaces import SamplingParams

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
PROMPT, TOKENS = 512, 24
SIZES = {"4 KiB": 1024, "64 KiB": 16 * 1024, "4 MiB": 1024 * 1024}  # float32 numbers
CALLS = {"4 KiB": 300, "64 KiB": 200, "4 MiB": 10}  # in a row, of which the median counts
CONFIG = EngineConfig(num_blocks=80, max_num_batched_tokens=PROMPT, prefix_cache="off", overlap="off")


def make_model(folder: Path, **changes: Any) -> None:
    """Writes a folder of SHAPE with random weights, the same every time."""
    import json

    from safetensors.torch import save_file

    from reference_impl.assembly.model import build_model
    from reference_impl.models.config_json import read_model_config
    from reference_impl.models.loader import destinations

    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    table = destinations(build_model(read_model_config(folder), device="meta", kernels="torch"))
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(spec.shape, generator=random) * 0.02 for name, (spec, _) in table.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def timed(engine: Engine) -> dict[str, float]:
    """Seconds of a prompt's step, and of a token's (median)."""
    request = engine.add(list(range(1, PROMPT + 1)), SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))
    seconds = []
    while request.finish_reason is None:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return {"prefill": seconds[0], "decode": statistics.median(seconds[1:])}


def engines_of(folder: Path) -> dict[str, Callable[[], Engine]]:
    def one(threads: int) -> Engine:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the process that starts
        return split_engine(folder, CONFIG)

    def two() -> Engine:
        os.environ["OMP_NUM_THREADS"] = "2"  # of which each rank takes its share
        return ranked_engine(folder, dataclasses.replace(CONFIG, tensor_parallel_size=2))

    return {"one thread": lambda: one(1), "two ranks": two, "two threads": lambda: one(2), "another": lambda: one(1)}


def run(rounds: int, **changes: Any) -> dict[str, Any]:
    """Measures both; returns a stamped result. changes: of the shape."""
    if (os.cpu_count() or 1) < 2:
        return {"not_measured": "two ranks need two cores: with fewer there are bytes and tokens only, no time"}
    stamp = harness.stamp()
    found: dict[str, dict[str, list[float]]] = {}
    threads = os.environ.get("OMP_NUM_THREADS")
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), **changes)
        engines = {name: make() for name, make in engines_of(Path(name)).items()}
        try:
            for turn in range(rounds + 1):
                for name in harness.rotated(["one thread", "two ranks", "two threads", "two processes"], turn):
                    times = _together(engines) if name == "two processes" else timed(engines[name])
                    if turn:
                        for phase, seconds in times.items():
                            found.setdefault(phase, {}).setdefault(name, []).append(seconds)
            sent = engines["two ranks"].executor.reports()  # type: ignore[attr-defined]
        finally:
            for engine in engines.values():
                engine.close()
            os.environ.pop("OMP_NUM_THREADS")
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads
    phases = {
        phase: {
            "two_ranks": harness.ratio(times["one thread"], times["two ranks"]),
            "two_threads": harness.ratio(times["one thread"], times["two threads"]),
            # Each does the whole work: together they do twice as much.
            "two_processes": harness.ratio([2 * t for t in times["one thread"]], times["two processes"]),
        }
        for phase, times in found.items()
    }
    per_token = sent[0].num_bytes / ((rounds + 1) * (PROMPT + TOKENS - 1))
    return {"stamp": stamp, "rounds": rounds, "phases": phases, "all_reduce": all_reduces(rounds),
            "bytes_per_token": per_token}  # fmt: skip


def _together(engines: dict[str, Engine]) -> dict[str, float]:
    """Of two processes with a model each, at the same time: the later one's seconds."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(timed, [engines["one thread"], engines["another"]]))
    return {phase: max(times[phase] for times in both) for phase in both[0]}


# --- all-reduces ------------------------------------------------------------------------------------------------------


def all_reduces(rounds: int) -> dict[str, dict[str, float]]:
    """How many times as fast as gloo's, by size."""
    board = Board(2)
    with tempfile.TemporaryDirectory() as folder:
        spawned, answers = get_context("spawn"), get_context("spawn").SimpleQueue()
        asked = (Path(folder) / "store", board.path, rounds, answers)
        ranks = [spawned.Process(target=_rank, args=(rank, *asked)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        found = answers.get()
        for rank in ranks:
            rank.join()
    board.close_path()
    return {size: harness.ratio(times["gloo"], times["memory"]) for size, times in found.items()}


def _rank(rank: int, store: Path, board: Path, rounds: int, answers: Any) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    at_most = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", store=FileStore(str(store), 2), rank=rank, world_size=2, timeout=at_most)
    memory = SharedMemoryRank(rank, Board(2, board), 300)
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for size, numbers in SIZES.items():
            x = torch.ones(numbers)
            ways = {"memory": lambda x=x: memory.all_reduce(x), "gloo": lambda x=x: dist.all_reduce(x.clone())}
            for way in harness.rotated(list(ways), turn):
                seconds = []
                for _ in range(CALLS[size]):
                    began = time.perf_counter()
                    ways[way]()
                    seconds.append(time.perf_counter() - began)
                if turn:
                    found.setdefault(size, {}).setdefault(way, []).append(statistics.median(seconds))
    dist.destroy_process_group()
    if rank == 0:
        answers.put(found)


def lines(result: dict[str, Any]) -> list[str]:
    """The figures as lines for a terminal."""
    if "not_measured" in result:
        return [result["not_measured"]]
    said = ["of one process with one thread, hidden size 2048, 8 layers, float32:"]
    for phase, row in result["phases"].items():
        said.append(f"  {phase}: " + ", ".join(f"{name.replace('_', ' ')} {harness.times(row[name])}" for name in row))
    said.append("all-reduce of two processes, memory that they share beside gloo:")
    said += [f"  {size}: {harness.times(row)}" for size, row in result["all_reduce"].items()]
    return [*said, f"{result['bytes_per_token']:,.0f} bytes a token that each rank shows to the other"]


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("parallel", 5, run, lines, arguments)
