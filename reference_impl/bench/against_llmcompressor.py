"""GPTQ and AWQ beside llmcompressor's: the same bits, groups and calibration rows, judged by one evaluator.

    INFERLAB_LLMCOMPRESSOR=FOLDER python -m reference_impl.bench against_llmcompressor [--models target] [--save]

Both quantize a course model to int4, symmetric, in groups of 128, with scales in bfloat16, from the same windows of a
text, anew for each seed, and compute in float32. Each does what it does by default: llmcompressor GPTQ with static
act-order and AWQ with "duo" scales, ours as `recipes.METHODS` says. Both write compressed-tensors; this engine loads
both and measures KL to the unquantized model on the same held-out text (`gates.py`).

What is verified: all linear layers are quantized in both, to the same bits; rounded to nearest, which has no choices,
both give the same codes but for ties, so that what this engine reads is what the other has written.

The difference is ours over theirs, less 1, of each seed; its mean has a 95 % interval by Student's t.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from reference_impl.assembly.model import load_model
from reference_impl.bench import gates, harness
from reference_impl.bench.peer_process import PeerFailed, PeerProcess
from reference_impl.bench.quality import compare
from reference_impl.models.loader import weight_files
from reference_impl.models.quantization.packing import unpack_words
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS

NAME, VARIABLE = "against_llmcompressor", "INFERLAB_LLMCOMPRESSOR"
WORKER = Path(__file__).with_name("llmcompressor_worker.py")
HOW = (
    "python -m venv FOLDER; FOLDER/bin/pip install llmcompressor (it needs other versions of packages than this "
    f"project does); then {VARIABLE}=FOLDER before the same command"
)
COMPARED = ("gptq", "awq")
GROUP_SIZE = 128
FIRST = 100  # no method was tuned on these draws; gates.json has those from 0 on
AIM = 0.05  # the most that the interval's upper end may be
TIES = 1e-3  # the share of codes of round-to-nearest that may differ
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 to 9 degrees of freedom


class Peer(Protocol):
    def ask(self, do: str, **what: Any) -> Any: ...


def run(
    models: Sequence[str], seeds: Sequence[int], work: Path, rows: int = gates.ROWS, length: int = gates.LENGTH
) -> dict[str, Any]:
    """Quantizes with both and compares. models: course models. seeds: of calibration draws, 2 to 10. work: a folder for
    checkpoints; those of llmcompressor that an earlier run has left there are taken as they are. Returns
    {"not_measured": why} without llmcompressor. Raises RuntimeError for checkpoints that must be alike and are not."""
    try:
        peer, versions = PeerProcess.started("llmcompressor", VARIABLE, WORKER)
    except PeerFailed as missing:
        return {"not_measured": f"{missing}; to have it: {HOW}"}
    with peer:
        pairs = {model: Pair(peer, gates.Judge(model), work / model) for model in models}
        found = {model: _compared(pair, seeds, rows, length) for model, pair in pairs.items()}
    about = {"peer": versions, "rows": rows, "length": length, "group_size": GROUP_SIZE}
    return {model: about | one for model, one in found.items()}


def _compared(pair: Pair, seeds: Sequence[int], rows: int, length: int) -> dict[str, Any]:
    tokens = {seed: gates.drawn_rows(pair.judge.calibration, rows, length, seed) for seed in seeds}
    nearest = pair.run("rtn", tokens[seeds[0]], "rtn")
    found: dict[str, Any] = {
        "judged_tokens": sum(len(window) - 1 for window in pair.judge.windows), "bits_per_weight": nearest["bits"],
        "rtn": verified(nearest, pair.folders("rtn")), "settings": {}, "methods": {},
    }  # fmt: skip
    for method in COMPARED:
        runs = []
        for seed in seeds:
            one = pair.run(method, tokens[seed], f"{method}-{seed}")
            if one["bits"] != nearest["bits"]:
                raise RuntimeError(f"{method}: expected {nearest['bits']} bits a weight, got {one['bits']}")
            found["settings"][method] = one["settings"]
            runs.append({"seed": seed, "ours": one["ours"], "theirs": one["theirs"]})
            print(f"{method} {seed}: KL {one['ours']:.5f}, llmcompressor's {one['theirs']:.5f}", flush=True)
        found["methods"][method] = {"runs": runs, "difference": difference(runs)}
    return found


class Pair:
    """A model quantized twice. judge: has the model, and the text that both are judged by."""

    def __init__(self, peer: Peer, judge: gates.Judge, folder: Path):
        self.peer, self.judge, self.folder = peer, judge, folder
        folder.mkdir(parents=True, exist_ok=True)

    def folders(self, name: str) -> tuple[Path, Path]:
        return self.folder / f"{name}-ours", self.folder / f"{name}-theirs"

    def run(self, method: str, tokens: Tensor, name: str) -> dict[str, Any]:
        """KL of ours and theirs, the bits a weight that both have, the settings that the other used."""
        ours, theirs = self.folders(name)
        settings = self._theirs(method, tokens, theirs)
        shutil.rmtree(ours, ignore_errors=True)
        quantize_folder(Job(self.judge.source, ours, replace(METHODS[method], group_size=GROUP_SIZE), tokens))
        (weights, bits), other = bits_of(ours), bits_of(theirs)
        if (weights, bits) != other:
            raise RuntimeError(f"{method}: expected {weights:,} weights of {bits} bits, as ours, got {other}")
        return {"ours": self.kl(ours), "theirs": self.kl(theirs), "bits": bits, "settings": settings}

    def _theirs(self, method: str, tokens: Tensor, out: Path) -> dict[str, str]:
        """Has llmcompressor write `out`, unless it has, by the same script from the same tokens. Returns its
        settings."""
        asked = {
            "source": str(self.judge.source), "method": method, "tokens": tokens.tolist(), "group_size": GROUP_SIZE
        }  # fmt: skip
        script = hashlib.sha256(WORKER.read_bytes()).hexdigest()
        done = out.with_name(out.name + ".json")  # written last: then the folder is whole
        if done.is_file() and (found := json.loads(done.read_text("utf-8")))["of"] == [script, asked]:
            earlier: dict[str, str] = found["settings"]
            return earlier
        shutil.rmtree(out, ignore_errors=True)
        settings: dict[str, str] = self.peer.ask("quantize", out=str(out), **asked)
        harness.write(done, {"of": [script, asked], "settings": settings})
        return settings

    def kl(self, folder: Path) -> float:
        return compare(load_model(folder, torch.float32), self.judge.plain, self.judge.windows)["kl"].value


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of the linear layers that are quantized: words, scales, shapes."""
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys() if ".weight_" in name}  # noqa: SIM118
    return found


def bits_of(folder: Path) -> tuple[int, float]:
    """(weights that are quantized, bits of each: codes and scales of 16 bits). Raises RuntimeError for scales that are
    no numbers of bfloat16, whatever dtype they are stored in."""
    bits = weights = 0
    for name, tensor in stored(folder).items():
        if name.endswith(".weight_packed"):
            bits += 8 * tensor.nbytes
        elif name.endswith(".weight_scale"):
            if not torch.equal(tensor.bfloat16().to(tensor.dtype), tensor):
                raise RuntimeError(f"{folder}: {name}: expected numbers of bfloat16, got more exact ones")
            bits += 16 * tensor.numel()
        elif name.endswith(".weight_shape"):
            weights += int(tensor[0] * tensor[1])
    return weights, bits / max(weights, 1)


def verified(nearest: dict[str, Any], folders: tuple[Path, Path]) -> dict[str, float]:
    """The KL of both for rounding to nearest, and how many codes differ. Raises RuntimeError if more than ties."""
    ours, theirs = (stored(folder) for folder in folders)
    differ = total = 0
    for name, packed in ours.items():
        if name.endswith(".weight_packed"):
            codes = [unpack_words(words, 4, 8 * packed.shape[1]) for words in (packed, theirs[name])]
            differ, total = differ + int((codes[0] != codes[1]).sum()), total + codes[0].numel()
    if differ > TIES * total:
        raise RuntimeError(f"rtn: expected the same codes but for ties, got {differ:,} of {total:,} that differ")
    return {"ours": nearest["ours"], "theirs": nearest["theirs"], "codes": total, "codes_that_differ": differ}


def difference(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The difference of ours over theirs, less 1: the mean over seeds, and the ends of its 95 % interval. Raises
    ValueError for fewer than 2 or more than 10 seeds."""
    if not 2 <= len(runs) <= len(T_975) + 1:
        raise ValueError(f"seeds: expected 2 to {len(T_975) + 1}, got {len(runs)}")
    shares = [run["ours"] / run["theirs"] - 1 for run in runs]
    mean, half = statistics.fmean(shares), T_975[len(runs) - 2] * statistics.stdev(shares) / len(runs) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def markdown(models: dict[str, Any]) -> str:
    """The table in Markdown. models: {course model: its result}."""
    lines = [
        "| model, method | KL, ours | KL, llmcompressor's | ours, more | 95 % interval | aim |",
        "|---|---:|---:|---:|---|---|",
    ]
    for model, result in models.items():
        rtn = result["rtn"]
        lines.append(f"| {model}, rtn | {rtn['ours']:.5f} | {rtn['theirs']:.5f} | - | - | the same |")
        for method, found in result["methods"].items():
            ours, theirs = (statistics.fmean(run[who] for run in found["runs"]) for who in ("ours", "theirs"))
            mean, low, high = (100 * found["difference"][name] for name in ("mean", "low", "high"))
            reached = "reached" if high < 100 * AIM else "missed"
            lines.append(
                f"| {model}, {method} | {ours:.5f} | {theirs:.5f} | {mean:+.1f} % | {low:+.1f} to {high:+.1f} % | "
                f"below {100 * AIM:+.0f} %: {reached} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 1 where llmcompressor is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m reference_impl.bench against_llmcompressor", description="Beside llmcompressor."
    )
    parser.add_argument("--models", nargs="+", choices=gates.MODELS, default=gates.MODELS, help="course models")
    parser.add_argument("--seeds", type=int, choices=range(2, len(T_975) + 2), default=5, help="calibration draws")
    parser.add_argument("--work", type=Path, help="keep checkpoints here, and take llmcompressor's that are there")
    parser.add_argument("--save", action="store_true", help="write results/against_llmcompressor.json")
    options = parser.parse_args(arguments)
    stamp = harness.stamp()
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(FIRST, FIRST + options.seeds)
        found = run(options.models, seeds, options.work or Path(folder))
    if "not_measured" in found:
        print(f"llmcompressor: not measured: {found['not_measured']}", file=sys.stderr)
        return 1
    print(markdown(found))
    if options.save:
        stamped = {model: {"stamp": stamp} | one for model, one in found.items()}
        print(f"wrote {harness.save(NAME, harness.recorded(NAME) | stamped)}")
    return 0
