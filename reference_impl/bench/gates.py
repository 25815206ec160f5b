"""Quality gates: how far each quantization method moves a course model, recorded, and the band that it has to keep to.

    python -m reference_impl.bench gates                    # every method, 5 calibration draws: renews the record
    python -m reference_impl.bench gates --only rtn,gptq    # some of them; the others stay as recorded
    python -m reference_impl.bench gates --speed            # how long decoding with each takes, beside the others
    ATEN_CPU_CAPABILITY=default python -m reference_impl.bench gates --seeds 1    # as a CPU with narrower vectors

Two things change what a method gives: which rows it is calibrated with, and in which order a CPU adds (AVX2, AVX512).
A run adds its draws to the record, by the instructions that it used. A band goes from the smallest to the largest of
all that was recorded, and further: by a tenth of it for KL, by one token in a hundred for agreement. What was seen of
instructions is within that (their spread stands in the record), so a band that was recorded with some holds with
others; what leaves it has changed the method. Not so of GPTQ: each column's error goes into the columns after it, so
one code that the last bit of a sum turns over changes all later ones, and another instruction set is as another draw.
That is no lack of precision: with Hessians in float64 KL and agreement spread as much (seed 0 of the target on AVX512:
0.0415 and 83.9 %, in float64 0.0427 and 85.7 %). Its band reaches two tokens in a hundred further.
The texts (`texts/`) are a copy of this project's own code, which no
course model was trained on; they never change, since the bands are of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.config import course_model
from reference_impl.assembly.model import load_model
from reference_impl.bench import harness
from reference_impl.bench.quality import compare, windows_of
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS, Recipe

MODELS = ("target", "draft")
ROWS, LENGTH, WINDOWS, WINDOW = 16, 128, 8, 128
KL_MARGIN, AGREEMENT_MARGIN, GPTQ_AGREEMENT_MARGIN = 0.1, 0.01, 0.02
SEEDS = 5


@dataclass(frozen=True)
class Band:
    """What a method may give, from the least to the most: kl in nats, agreement as a share."""

    kl: tuple[float, float]
    agreement: tuple[float, float]

    def broken(self, kl: float, agreement: float) -> list[str]:
        """What is outside the band, in words; nothing if all is well."""
        pairs = (("KL", kl, self.kl), ("agreement", agreement, self.agreement))
        return [
            f"{name}: expected {low:.5f} to {high:.5f}, got {value:.5f}"
            for name, value, (low, high) in pairs
            if not low <= value <= high
        ]


def band_of(runs: Sequence[dict[str, Any]], recipe: Recipe) -> Band:
    """The band around recorded runs. runs: of one method, {"kl", "agreement"} each. Raises ValueError without any."""
    if not runs:
        raise ValueError("band: expected at least one run, got none: python -m reference_impl.bench gates")
    kl, agreement = ([run[what] for run in runs] for what in ("kl", "agreement"))
    margin = GPTQ_AGREEMENT_MARGIN if recipe.rounding == "gptq" else AGREEMENT_MARGIN
    return Band(
        (min(kl) * (1 - KL_MARGIN), max(kl) * (1 + KL_MARGIN)),
        (min(agreement) - margin, min(1.0, max(agreement) + margin)),
    )


def draws_matter(recipe: Recipe) -> bool:
    return recipe.calibrated or recipe.rotate


def drawn_rows(ids: Sequence[int], rows: int, length: int, seed: int) -> Tensor:
    """Windows of a text at random places, which may overlap: [rows, length] int64."""
    starts = torch.randint(0, len(ids) - length, (rows,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([list(ids[start : start + length]) for start in starts.tolist()])


class Judge:
    """One course model with its own logits, to which quantized ones are compared."""

    def __init__(self, model: str):
        self.source = course_model(model)
        encoder = PromptEncoder(self.source)
        self.calibration = encoder.tokens_of((harness.TEXTS / "calibration.txt").read_text("utf-8"))
        self.windows = windows_of(encoder.tokens_of((harness.TEXTS / "judged.txt").read_text("utf-8")), WINDOW, WINDOWS)
        self.plain = load_model(self.source, torch.float32)

    def run(self, recipe: Recipe, seed: int, out: Path) -> dict[str, Any]:
        """Quantizes into the folder `out`, which is not there yet. Returns kl, agreement, bits_per_weight,
        quantized_bytes, file_bytes, form, and seconds (of quantizing)."""
        tokens = drawn_rows(self.calibration, ROWS, LENGTH, seed)
        began = time.perf_counter()
        report = quantize_folder(Job(self.source, out, replace(recipe, seed=seed), tokens))
        seconds = time.perf_counter() - began
        found = compare(load_model(out, torch.float32), self.plain, self.windows)
        kept = ("bits_per_weight", "quantized_bytes", "file_bytes", "form")
        return {"kl": found["kl"].value, "agreement": found["agreement"].value, "seconds": seconds} | {
            name: report[name] for name in kept
        }


def record(record: dict[str, Any], models: Sequence[str], methods: Sequence[str], seeds: int) -> dict[str, Any]:
    """The record with what was run now in place of earlier runs of the same method, draw and instructions."""
    stamp = harness.stamp()
    found: dict[str, Any] = {"stamp": stamp, "models": record.get("models", {})}
    for model in models:
        judge, kept = Judge(model), found["models"].setdefault(model, {})
        for method in methods:
            runs = [run for run in kept.get(method, []) if run["instructions"] != stamp["instructions"]]
            for seed in range(seeds if draws_matter(METHODS[method]) else 1):
                with tempfile.TemporaryDirectory() as folder:
                    run = judge.run(METHODS[method], seed, Path(folder) / "out")
                runs.append({"instructions": stamp["instructions"], "seed": seed} | run)
                print(f"{model} {method} {seed}: KL {run['kl']:.5f}, same first {run['agreement']:.4f}", flush=True)
            kept[method] = runs
    return found


def speeds(methods: Sequence[str], rounds: int, new_tokens: int = 24) -> dict[str, Any]:
    """The time of a decoding step of the target, one stream, over that of the model that is not quantized, both with
    activations in float32, round by round."""
    from reference_impl.assembly.llm import LLM
    from reference_impl.interfaces import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    source, calibration = course_model("target"), Judge("target").calibration
    tokens = drawn_rows(calibration, 2, LENGTH, 0)  # what the numbers are makes no step slower
    with tempfile.TemporaryDirectory() as folder:
        llms = {"none": LLM(source, dtype="float32", num_blocks=16)}
        for method in methods:
            out = Path(folder) / method
            quantize_folder(Job(source, out, METHODS[method], tokens))
            llms[method] = LLM(out, dtype="float32", num_blocks=16)
        generate = {name: partial(llm.generate, [[5, 6, 7, 8]], sampling) for name, llm in llms.items()}
        seconds = harness.interleave(dict[str, Callable[[], object]](generate), rounds)
    steps = {name: harness.ratio(seconds[name], seconds["none"]) for name in methods}
    return {"stamp": harness.stamp(), "step_over_float32": steps}


def markdown(record: dict[str, Any], model: str = "target") -> str:
    """A table of methods by bits: bits a weight, bytes, KL and agreement (median and range over draws), a step's
    time."""
    head = "| method | bits a weight | MB, linear layers | KL, nats | range | same first token | a step, of float32's |"
    lines = [head, "|---|---:|---:|---:|---|---:|---:|"]
    methods, steps = record["models"][model], record.get("speed", {}).get("step_over_float32", {})
    for method in sorted(methods, key=lambda name: (-methods[name][0]["bits_per_weight"], name)):
        runs = methods[method]
        kl, agreement = (sorted(run[what] for run in runs) for what in ("kl", "agreement"))
        half = len(runs) // 2
        size = f"{runs[0]['quantized_bytes'] / 1e6:.2f}" + (" \\*" if runs[0]["form"] == "dense" else "")
        step = f"{steps[method]['median']:.2f}x" if method in steps else "-"
        spread = f"{kl[0]:.5f}-{kl[-1]:.5f}" if kl[-1] > 1.001 * kl[0] else "-"
        lines.append(
            f"| {method} | {runs[0]['bits_per_weight']:.3f} | {size} | {kl[half]:.5f} | {spread} | "
            f"{100 * agreement[half]:.1f} % | {step} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench gates", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(METHODS), help="methods, between commas")
    parser.add_argument("--models", default=",".join(MODELS), help="course models, between commas")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="calibration draws of a method that has some")
    parser.add_argument("--speed", action="store_true", help="nothing but the time of a decoding step")
    options = parser.parse_args(arguments)
    methods, models = options.only.split(","), options.models.split(",")
    for given, known in ((methods, tuple(METHODS)), (models, MODELS)):
        if unknown := [name for name in given if name not in known]:
            print(f"expected some of {', '.join(known)}, got {', '.join(unknown)}", file=sys.stderr)
            return 2
    before = harness.recorded("gates")
    if options.speed:
        found = before | {"speed": speeds(methods, rounds=9)}
    else:
        found = before | record(before, models, methods, options.seeds)
    print(f"wrote {harness.save('gates', found)}")
    return 0
