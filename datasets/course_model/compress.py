"""Training that makes models smaller, minutes each on a CPU: what each buys on the course models.

    python datasets/course_model/compress.py qat int4 --steps 40         # the target, rounded while it learns
    python datasets/course_model/compress.py qat ternary --steps 120
    python datasets/course_model/compress.py distill --steps 60          # the draft, by three losses from one start

Nothing that is shipped changes. Results go to reference_impl/bench/results/compression.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import train as base  # noqa: E402
from distill import load, load_target  # noqa: E402

from reference_impl import LLM, SamplingParams  # noqa: E402
from reference_impl.assembly.model import load_model  # noqa: E402
from reference_impl.bench import gates, harness  # noqa: E402
from reference_impl.bench.quality import compare  # noqa: E402
from reference_impl.models.compression import distillation  # noqa: E402
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder  # noqa: E402
from reference_impl.models.quantization.recipes import METHODS, Recipe  # noqa: E402
from reference_impl.models.quantization.straight_through import Rounded  # noqa: E402

LR = {"int4": 1e-4, "ternary": 1e-3, "distill": 3e-4}
ROWS, LENGTH, PROMPT = 8, 256, 32
RENEWED = 4  # steps that learn from texts of one student


def save_as(model: nn.Module, name: str, folder: Path) -> None:
    """As a folder of Hugging Face's, in float32: rounding comes later, from the very weights that were learned."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for file in (HERE / name).glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    exact = {
        key.replace("parametrizations.weight.original", "weight"): value for key, value in model.state_dict().items()
    }
    tensors = {base.name_in_checkpoint(key): value.contiguous() for key, value in exact.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def learn(model: nn.Module, steps: int, lr: float, loss_of: Callable[[int], Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses, began = [], time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 5, (steps - step) / (0.4 * steps))
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        print(f"step {step + 1} of {steps}: {losses[-1]:.4f}, {time.time() - began:.0f} s", flush=True)
    return losses


def judged(judge: gates.Judge, source: Path, out: Path, recipe: Recipe) -> dict[str, float]:
    report = quantize_folder(Job(source, out, recipe))
    found = compare(load_model(out, torch.float32), judge.plain, judge.windows)
    return {
        "kl": found["kl"].value,
        "agreement": found["agreement"].value,
        "bits_per_weight": report["bits_per_weight"],
    }


def qat(scheme: str, steps: int) -> dict[str, Any]:
    """The target towards its own predictions, on training rows, while all its linear layers are rounded."""
    torch.manual_seed(0)
    teacher, student = load_target("cpu"), load("target")
    rows = base.Rows(base.RECIPES["target"], HERE / "target" / "tokenizer.json")
    recipe = METHODS["rtn" if scheme == "int4" else scheme]
    for module in student.modules():
        if isinstance(module, nn.Linear):
            rounding = Rounded(recipe.scheme_of("", module.in_features))
            register_parametrization(module, "weight", rounding, unsafe=True)

    def loss_of(step: int) -> Tensor:
        ids = torch.as_tensor(rows.step(step, ROWS, LENGTH)[0])
        with torch.no_grad():
            wanted = teacher(ids)
        return distillation.forward_kl(student(ids), wanted)

    began = time.time()
    losses = learn(student, steps, LR[scheme], loss_of)
    seconds = time.time() - began
    judge = gates.Judge("target")
    with tempfile.TemporaryDirectory() as folder:
        save_as(student, "target", Path(folder) / "learned")
        after = judged(judge, Path(folder) / "learned", Path(folder) / "after", recipe)
        before = judged(judge, judge.source, Path(folder) / "before", recipe)
    return {"steps": steps, "rows": ROWS, "length": LENGTH, "seconds": seconds, "first_loss": losses[0],
            "last_loss": losses[-1], "before": before, "after": after}  # fmt: skip


def written(folder: Path, prompts: list[list[int]], temperature: float, seed: int = 0) -> Tensor:
    """[rows, LENGTH / 2]: prompts, and what the model of a folder goes on with."""
    llm = LLM(folder, dtype="float32", max_num_seqs=32, max_model_len=LENGTH)
    sampling = [
        SamplingParams(max_tokens=LENGTH // 2 - PROMPT, temperature=temperature, seed=seed + row, ignore_eos=True)
        for row in range(len(prompts))
    ]
    outputs = llm.generate(prompts, sampling)
    return torch.tensor([[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)])


def rows_of(step: int, count: int) -> list[int]:
    """Which of `count` texts a step learns from: ROWS of them, one pass after the other."""
    return [(step * ROWS + row) % count for row in range(ROWS)]


def distill(steps: int) -> dict[str, Any]:
    """The draft, from its shipped weights, by each loss; judged on text of the target that none was trained on.
    On-policy, the student itself writes what it learns from, anew every RENEWED steps."""
    teacher = load_target("cpu")
    rows = base.Rows(base.RECIPES["target"], HERE / "target" / "tokenizer.json")
    count = ROWS * 12
    starts = torch.randint(0, len(rows.text) - LENGTH, (count + 32,), generator=torch.Generator().manual_seed(5))
    prompts = [[int(t) for t in rows.text[start : start + PROMPT]] for start in starts.tolist()]
    texts = written(HERE / "target", prompts, 0.0)
    held, texts = texts[count:], texts[:count]

    def agreement(student: nn.Module) -> float:
        with torch.no_grad():
            return distillation.agreement(student(held)[:, PROMPT - 1 :], teacher(held)[:, PROMPT - 1 :])

    def taught(kind: str) -> dict[str, float]:
        torch.manual_seed(0)
        student, own = load("draft"), texts.clone()
        before, began = agreement(student), time.time()

        def loss_of(step: int) -> Tensor:
            places = rows_of(step, count)
            if kind == "on-policy" and step % RENEWED == 0:
                soon = sorted({place for later in range(RENEWED) for place in rows_of(step + later, count)})
                with tempfile.TemporaryDirectory() as folder:
                    save_as(student, "draft", Path(folder) / "student")
                    own[soon] = written(Path(folder) / "student", [prompts[i] for i in soon], 1.0, seed=1000 * step)
            ids = own[places]
            logits = student(ids)[:, PROMPT - 1 : -1]
            if kind == "response":
                return distillation.response(logits, ids[:, PROMPT:])
            with torch.no_grad():
                wanted = teacher(ids)[:, PROMPT - 1 : -1]
            return distillation.forward_kl(logits, wanted)

        learn(student, steps, LR["distill"], loss_of)
        return {"before": before, "after": agreement(student), "seconds": time.time() - began}

    found = {kind: taught(kind) for kind in ("response", "logits", "on-policy")}
    return {"steps": steps, "rows": ROWS, "length": LENGTH // 2, "texts": count, "held": len(held), "losses": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rounded = commands.add_parser("qat")
    rounded.add_argument("scheme", choices=("int4", "ternary"))
    rounded.add_argument("--steps", type=int, default=40)
    commands.add_parser("distill").add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    key = options.command if options.command == "distill" else f"qat {options.scheme}"
    result = distill(options.steps) if options.command == "distill" else qat(options.scheme, options.steps)
    file = harness.RESULTS / "compression.json"
    before = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    harness.save("compression", before | {key: result | {"stamp": harness.stamp()}})
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
