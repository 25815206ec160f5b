"""A model of your own in BF16 and in INT4 by AWQ: what bytes and bandwidth foretell of decoding, then what is measured.

    inferlab bench awq_throughput --model FOLDER [--out FOLDER] [--json FILE]     (--help: all options)

For a 7B on a GPU: a Hugging Face folder of a model that is not quantized. It is quantized a layer at a time, on the
CPU: for a 7B that takes hours rather than minutes. Give --out, then a run that was stopped goes on where it was, and a
folder that is finished is used again. Both folders are then served one after the other, at each batch. The forecast
comes first: seconds of a decode step = the larger of bytes read over bandwidth and operations over peak. On a terminal
it then waits for Enter, so that you can write down your own.

Without --model this is the exercise's declared form for a CPU: the course model in place of the 7B, in about a minute.
What it then measures are a CPU's times of a model that is small enough for its caches: they say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.bench.profiling.record import measure
from reference_impl.bench.quality import logprobs, windows_of
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.interfaces import SamplingParams
from reference_impl.models.quantization.calibration import calibration_tokens
from reference_impl.models.quantization.quantize_folder import REPORT, Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import DEVICES
from reference_impl.theory.model_shapes import ModelShape, from_config

FORMATS = ("bf16", "int4")
CPU_FORM = "declared CPU form: these are a CPU's times of a small model, and say nothing about a GPU"


@dataclass(frozen=True)
class Limits:
    """A machine's limits. bandwidth: byte/s. peak: FLOP/s in 16 bits, in which both formats compute; on a CPU in 32, if
    that is faster. source: in words."""

    bandwidth: float
    peak: float
    source: str


def limits_here() -> Limits:
    """Limits of this machine: a GPU's from its data sheet, if `theory.hardware` has it; else those of two operations
    timed now."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if known := [row for key, row in DEVICES.items() if key.lower() in name.lower()]:
            return Limits(known[0].bandwidth, known[0].peak("bf16"), f"data sheet of the {known[0].sku}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = measure(device, torch.bfloat16)
    return Limits(machine.bandwidth, machine.rate, f"measured now: a copy, and a product in {machine.multiplies}")


def forecast(shape: ModelShape, limits: Limits, batch: int, context: int, bits: float) -> dict[str, float]:
    """{bf16, int4: seconds of a decode step; gain}. bits: of an INT4 weight with its scale; embedding, output
    projection and cache stay in 16."""
    flops = batch * latency.decode_flops(shape, context)
    cache = batch * context * kv_cache.bytes_per_token(shape)
    found = {}
    for name, each in zip(FORMATS, (16.0, bits), strict=True):
        read = kv_cache.read_bytes(shape, each, embedding_bits=16) + cache
        found[name] = float(max(read / limits.bandwidth, flops / limits.peak))
    return found | {"gain": found["bf16"] / found["int4"]}


def decode_seconds(llm: LLM, batch: int, prompt_tokens: int, new_tokens: int, rounds: int = 2) -> float:
    """Seconds of a step in which `batch` requests decode: from the end of the first such step to the end of the last,
    median of the steps' share over rounds. The first round warms up and does not count."""
    vocabulary, found = llm.engine.model.config.vocab_size, []
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (batch, prompt_tokens), generator=random).tolist()
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for _ in range(1 + rounds):
        llm.engine.trace.events.clear()
        llm.generate(prompts, sampling)
        ends = [
            step.finished_at
            for step in llm.engine.trace.steps()
            if len(step.rows) == batch and all(row.num_tokens == 1 for row in step.rows)
        ]
        if len(ends) < 2:
            raise ValueError(
                f"batch {batch}: expected at least 2 steps in which all requests decode, saw {len(ends)}: give more "
                "memory to the cache, or ask for smaller batches (--batches)"
            )
        found.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return median(found[1:])


def served(
    folder: Path, asked: argparse.Namespace, windows: Sequence[Sequence[int]]
) -> tuple[list[float], list[Tensor]]:
    """(seconds of a decode step at each batch, log-probabilities [tokens, vocabulary] of each window)."""
    most, each = max(asked.batches), asked.prompt + asked.new
    shape = _shape_of(Path(asked.model))
    room = int(1.1 * most * (each + 32) * kv_cache.bytes_per_token(shape)) + 2**20
    llm = LLM(
        folder, dtype="bfloat16", prefix_cache="off", max_num_seqs=most, kv_cache_bytes=room,
        max_num_batched_tokens=max(2048, most), max_model_len=max(2 * each, 256),
    )  # fmt: skip
    try:
        seconds = [decode_seconds(llm, batch, asked.prompt, asked.new) for batch in asked.batches]
        found = [logprobs(llm.engine.model, window[:-1]).cpu() for window in windows]
    finally:
        llm.engine.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return seconds, found


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole exercise and prints as it goes. Returns what --json writes."""
    source = Path(asked.model)
    shape, limits, bits = _shape_of(source), limits_here(), kv_cache.bits_per_weight(4, 128)
    on_gpu = torch.cuda.is_available()
    form = "GPU" if on_gpu else CPU_FORM
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    context = asked.prompt + asked.new // 2
    print(f"{source.name}: {shape.num_params / 1e9:.3g} billion weights, {name}. {form}")
    print(f"limits: {limits.bandwidth / 1e9:,.1f} GB/s, {limits.peak / 1e12:,.2f} TFLOP/s ({limits.source})")
    rows = [
        {"batch": batch, "forecast": forecast(shape, limits, batch, context, bits), "measured": {}}
        for batch in asked.batches
    ]
    print(f"FORECAST of a decode step at a context of {context}, INT4 in groups of 128 ({bits} bits a weight):")
    for row in rows:
        _say(row["batch"], row["forecast"])
    if sys.stdin.isatty():
        input("Write down your own forecast of the gain at each batch, then press Enter: ")
    encoder = ChatEncoder(source)
    tokens = calibration_tokens(encoder.tokens_of(_text(asked.calibration)), asked.rows, asked.length)
    windows = windows_of(encoder.tokens_of(_text(asked.text)), asked.length, asked.windows)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(asked.out) if asked.out else Path(scratch) / "awq"
        began = time.perf_counter()
        if (out / REPORT).is_file():
            print(f"{out} is quantized already, and used as it is")
            report = json.loads((out / REPORT).read_text("utf-8"))
        else:
            shown = lambda done, of: print(f"  layer {done} of {of}, {time.perf_counter() - began:.0f} s")  # noqa: E731
            report = quantize_folder(Job(source, out, METHODS["awq"], tokens, progress=shown))
        seconds = time.perf_counter() - began
        print(f"AWQ took {seconds:.1f} s: {report['bits_per_weight']:.3f} bits a weight, all files "
              f"{report['file_bytes'] / 1e6:,.1f} MB, before {report['file_bytes_before'] / 1e6:,.1f} MB")  # fmt: skip
        (plain, before), (packed, after) = (served(folder, asked, windows) for folder in (source, out))
    print("MEASURED:")
    for row, one, other in zip(rows, plain, packed, strict=True):
        row["measured"] = {"bf16": one, "int4": other, "gain": one / other}
        _say(row["batch"], row["measured"])
    kl = sum(float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(before, after, strict=True)) / len(windows)
    same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(before, after, strict=True)])
    print(f"KL {kl:.4f} nats a token, same first token {float(same.float().mean()):.1%}, {len(windows)} windows of "
          f"{asked.length} tokens")  # fmt: skip
    return {
        "model": source.name, "form": form, "device": name, "dtype": "bfloat16", "num_params": shape.num_params,
        "limits": {"bandwidth": limits.bandwidth, "peak": limits.peak, "source": limits.source}, "context": context,
        "bits_per_weight": report["bits_per_weight"], "file_bytes": report["file_bytes"],
        "file_bytes_before": report["file_bytes_before"], "quantize_seconds": seconds, "batches": rows, "kl": kl,
        "agreement": float(same.float().mean()), "windows": len(windows), "stamp": harness.stamp(),
    }  # fmt: skip


def _say(batch: int, found: dict[str, float]) -> None:
    rates = ", ".join(f"{name} {1e3 * found[name]:.3f} ms ({batch / found[name]:,.0f} tokens/s)" for name in FORMATS)
    print(f"  batch {batch}: {rates}: {found['gain']:.2f}x")


def _shape_of(folder: Path) -> ModelShape:
    file = folder / "config.json"
    if not file.is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"--model: expected the folder of a model (config.json and *.safetensors), got {str(folder)!r}: give the "
            "folder into which you downloaded the checkpoint, or leave --model out for the course model"
        )
    return from_config(json.loads(file.read_text("utf-8")), folder.name)


def _text(file: str) -> str:
    if not Path(file).is_file():
        raise ValueError(f"expected a file of text, got {file!r}")
    return Path(file).read_text("utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="inferlab bench awq_throughput", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", help="folder; default: the course model")
    parser.add_argument("--out", help="where the quantized folder stays; default: nowhere")
    parser.add_argument("--calibration", default=str(harness.TEXTS / "calibration.txt"), help="like your prompts")
    parser.add_argument("--text", default=str(harness.TEXTS / "judged.txt"), help="another one, which judges")
    parser.add_argument("--rows", type=int, help="calibration windows; default: 16, and 4 of the course model")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="of the text that judges")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens that each request decodes")
    parser.add_argument("--json", help="file to write everything to")
    try:
        asked = parser.parse_args(arguments)
        asked.rows = asked.rows or (16 if asked.model else 4)
        asked.model = asked.model or str(course_model("target"))
        found = run(asked)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.json:
        harness.write(Path(asked.json), found)
    return 0
