"""What pruning and low-rank factors cost the course model, and what zeros save.

    python -m reference_impl.bench compression

Layer by layer, each calibrated on what the layers before it have become; judged as in `gates.py`.
Speed: a product of a dense matrix, of the same with zeros in place of pruned weights, and of torch's sparse CSR form,
interleaved in one run. What trains (`datasets/course_model/compress.py`) adds its results to the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.model import load_model
from reference_impl.bench import gates, harness
from reference_impl.bench.quality import compare
from reference_impl.core.decoder import Decoder, DecoderLayer
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.models.compression import low_rank, pruning
from reference_impl.models.quantization.by_layer import linears_of
from reference_impl.models.quantization.calibration import Rows, Statistics
from reference_impl.models.quantization.folding import matrix

Change = Callable[[Tensor, Tensor], Tensor]  # (weight [out, in], gram [in, in]) -> what takes its place
PLAIN = UnquantizedLinear(torch.float32, torch.device("cpu"))  # matrices that can be written to: no CPU packs them
SHARE = 0.5
REPEATS = 20
CSR_SPARSITY = (0.5, 0.9, 0.97)


def norms(gram: Tensor) -> Tensor:
    return gram.diagonal().sqrt()


def thin(weight: Tensor, gram: Tensor | None, share: float) -> Tensor:
    out, inputs = weight.shape
    a, b = low_rank.factors(weight, low_rank.rank_for(out, inputs, share), gram)
    return (a @ b).to(weight.dtype)


CHANGES: dict[str, tuple[Change, str]] = {
    "magnitude, 50 %": (lambda w, g: w * pruning.keep(pruning.magnitude(w), SHARE), "bitmap"),
    "Wanda, 50 %": (lambda w, g: w * pruning.keep(pruning.wanda(w, norms(g)), SHARE), "bitmap"),
    "magnitude, 2:4": (lambda w, g: w * pruning.keep_two_of_four(pruning.magnitude(w)), "2:4"),
    "Wanda, 2:4": (lambda w, g: w * pruning.keep_two_of_four(pruning.wanda(w, norms(g))), "2:4"),
    "low rank, half the numbers": (lambda w, g: thin(w, None, SHARE), "factors"),
    "low rank, nearest output": (lambda w, g: thin(w, g, SHARE), "factors"),
}


@torch.inference_mode()
def change(model: Decoder, tokens: Tensor, how: Change) -> None:
    """Changes every matrix in place, with the Gram of its inputs over tokens [rows, length]."""
    rows = Rows.of(model, tokens)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        for linear in linears_of(layer):
            gram = rows.watch(layer, linear, Statistics()).known_gram
            matrix(linear).copy_(how(matrix(linear), gram))
        rows.advance(layer)


def bits_per_weight(shapes: Sequence[tuple[int, int]], form: str) -> float:
    """Bits per weight of all matrices together, values of 16 bits."""
    total = sum(out * inputs for out, inputs in shapes)
    if form == "factors":
        return sum(16 * low_rank.rank_for(out, inputs, SHARE) * (out + inputs) for out, inputs in shapes) / total
    return sum(pruning.stored_bits(out, inputs, SHARE, form) for out, inputs in shapes) / total


def quality(model: str = "target", names: Sequence[str] = tuple(CHANGES)) -> dict[str, Any]:
    judge = gates.Judge(model)
    found: dict[str, dict[str, Any]] = {}
    tokens = gates.drawn_rows(judge.calibration, gates.ROWS, gates.LENGTH, 0)
    shapes = [(linear.out_features, linear.in_features) for linear in judge.plain.linears()]
    for name in names:
        how, form = CHANGES[name]
        changed = load_model(judge.source, torch.float32, linear_method=PLAIN)
        change(changed, tokens, how)
        measured = compare(changed, judge.plain, judge.windows)
        size = {"bits_per_weight": bits_per_weight(shapes, form), "form": form}
        found[name] = {"kl": measured["kl"].value, "agreement": measured["agreement"].value} | size
        print(name, found[name], flush=True)
    return found


def products(size: int, rows: int, rounds: int) -> dict[str, Any]:
    """Seconds of REPEATS products of x [rows, size] and a matrix [size, size] in float32, over those of the dense one,
    round by round."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, size, generator=random) for n in (rows, size))
    candidates: dict[str, Callable[[], object]] = {"dense": lambda: x @ weight.T}
    for sparsity in CSR_SPARSITY:
        zeros = weight * pruning.keep(pruning.magnitude(weight), sparsity)
        csr = zeros.to_sparse_csr()
        torch.testing.assert_close((csr @ x.T).T, x @ zeros.T, rtol=1e-3, atol=1e-3)
        candidates[f"{sparsity:.0%} zeros, dense"] = lambda zeros=zeros: x @ zeros.T  # type: ignore[misc]
        candidates[f"{sparsity:.0%} zeros, CSR"] = lambda csr=csr: csr @ x.T  # type: ignore[misc]
    repeated = {name: partial(_repeat, product) for name, product in candidates.items()}
    seconds = harness.interleave(dict[str, Callable[[], object]](repeated), rounds)
    ratios = {name: harness.ratio(found, seconds["dense"]) for name, found in seconds.items() if name != "dense"}
    return {"size": size, "rows": rows, "over_dense": ratios}


def _repeat(product: Callable[[], object]) -> None:
    for _ in range(REPEATS):
        product()


def markdown(record: dict[str, Any]) -> str:
    """The parts of the record that are there, in Markdown."""
    rows = ["| pruned, factored | bits a weight | KL, nats | same first token |", "|---|---:|---:|---:|"]
    for name, row in record.get("quality", {}).items():
        rows.append(f"| {name} | {row['bits_per_weight']:.2f} | {row['kl']:.3f} | {100 * row['agreement']:.1f} % |")
    if "products" in record:
        rows += ["", "| a product with zeros, time over the dense one | 1 row | 64 rows |", "|---|---:|---:|"]
        one, many = (found["over_dense"] for found in record["products"])
        rows += [f"| {name} | {one[name]['median']:.2f} | {many[name]['median']:.2f} |" for name in one]
    trained = {name: row for name, row in record.items() if name.startswith("qat")}
    if trained:
        rows += ["", "| trained while it is rounded | steps, s | KL before | after | same first token before | after |",
                 "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name, row in trained.items():
        b, a = row["before"], row["after"]
        rows.append(
            f"| {name[4:]} | {row['steps']}, {row['seconds']:.0f} | {b['kl']:.4f} | {a['kl']:.4f} | "
            f"{100 * b['agreement']:.1f} % | {100 * a['agreement']:.1f} % |"
        )
    if "distill" in record:
        rows += [
            "",
            "| the draft, distilled | first token as the target's, before | after | s |",
            "|---|---:|---:|---:|",
        ]
        for name, row in record["distill"]["losses"].items():
            rows.append(f"| {name} | {100 * row['before']:.1f} % | {100 * row['after']:.1f} % | {row['seconds']:.0f} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="inferlab bench compression", description=__doc__).parse_args(arguments)
    found = {"quality": quality(), "products": [products(2048, rows, 9) for rows in (1, 64)], "stamp": harness.stamp()}
    print(f"wrote {harness.save('compression', harness.recorded('compression') | found)}")
    return 0
