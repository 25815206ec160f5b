"""How drafters for the course target are trained (feature_head.py, multi_token.py, medusa_heads.py): towards the
target's own words.

Each draft token's distribution is drawn towards the target's (KL divergence), first on the training rows, then on text
that the target wrote itself, since that is where they will draft. Embedding and lm_head are the target's, and stay as
they are.

    train      on the training rows
    outputs    the target continues training rows: its own text
    align      goes on, on that text
    export     bf16 safetensors, and what was measured

Resumable and seeded, as train.py is; minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import train as base  # noqa: E402

HELD = 32  # rows of the target's own text that are only measured on
PROMPT = 64  # tokens of a row of it that are not its own


@dataclass(frozen=True)
class Recipe:
    steps: int = 1000
    align_steps: int = 300
    rows: int = 12
    length: int = 256
    ahead: int = 4  # drafts in a row that it is trained for
    decay: float = 0.8  # weight of each draft token against the one before it
    lr: float = 3e-3
    align_lr: float = 8e-4
    seed: int = 777
    mixed: bool = True  # products in bf16 while it trains: slower than float32 on a CPU that only emulates them


@dataclass(frozen=True)
class Drafter:
    """What is trained.

    name: of its folder, and of its checkpoints. make: with its first weights, from the target.
    passes: (module, target, ids [rows, length], ahead) -> the module's logits, for each draft token [rows, length - 1,
    vocab_size]; and the target's. Entry [r, p] of draft token j is of token p + 2, from the target's features of p - j.
    name_in_checkpoint: of a parameter. config: config.json, of the target's.
    """

    name: str
    recipe: Recipe
    make: Callable[[base.CourseModel], nn.Module]
    passes: Callable[[Any, base.CourseModel, Tensor, int], tuple[list[Tensor], Tensor]]
    name_in_checkpoint: Callable[[str], str]
    config: Callable[[dict[str, Any]], dict[str, Any]]


def features_and_logits(target: base.CourseModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = target.embed(ids)
    for layer in target.layers:
        x = layer(x, target.cos, target.sin)
    features = F.rms_norm(x, x.shape[-1:], target.norm, base.NORM_EPS)
    return features, F.linear(features, target.embed.weight)


def loss_of(found: list[Tensor], wanted: Tensor, weight: Tensor, decay: float) -> Tensor:
    """The KL divergence from the target's distribution to each draft's. found, wanted: as `Drafter.passes` gives them.
    weight [rows, length]."""
    loss, share = torch.zeros((), device=wanted.device), 1.0
    log_p = wanted.float().log_softmax(-1)
    p, weight = log_p.exp(), weight[:, 1:]
    entropy = -(p * log_p).sum(-1)
    for j, own in enumerate(found):
        # of a row's first j positions there is no draft token made j passes before
        kl = torch.einsum("rlv,rlv->rl", p, -own.float().log_softmax(-1)) - entropy
        loss = loss + share * (kl * weight)[:, j:].sum() / weight[:, j:].sum()
        share *= decay
    return loss


@torch.no_grad()
def accepted(drafter: Drafter, module: nn.Module, target: base.CourseModel, ids: Tensor) -> list[float]:
    """ids [rows, length]: prompts of the training rows and the target's own greedy text behind them. In that text, how
    often draft token j is right where those before it were."""
    module.eval()
    found, wanted = drafter.passes(module, target, ids, drafter.recipe.ahead)
    right, best = torch.ones(wanted.shape[:2], dtype=torch.bool, device=ids.device), wanted.argmax(-1)
    rates = []
    for j, own in enumerate(found):
        before = F.pad(right, (1, 0))[:, :-1] if j else right
        now = own.argmax(-1) == best
        at = before[:, PROMPT:]
        rates.append(float((now[:, PROMPT:] & at).sum() / at.sum()))
        right = before & now
    module.train()
    return rates


def load(name: str) -> base.CourseModel:
    """Target or draft, with the weights that train.py exported."""
    from safetensors.torch import load_file

    model = base.CourseModel(base.RECIPES[name])
    tensors = load_file(HERE / name / "model.safetensors")
    model.load_state_dict({key: tensors[base.name_in_checkpoint(key)].float() for key in model.state_dict()})
    return model


def load_target(device: str) -> base.CourseModel:
    return load("target").to(device).requires_grad_(False)


def own_text(work: Path, rows: int = 1280, prompt: int = PROMPT, length: int = 256) -> None:
    """The target continues the beginnings of training rows, half of them greedily, half drawn at temperature 0.8."""
    from reference_impl.assembly.llm import LLM
    from reference_impl.interfaces import SamplingParams

    source = base.Rows(base.RECIPES["target"], HERE / "target" / "tokenizer.json")
    rng = random.Random(99)
    prompts = []
    for row in range(rows):
        if row % 4 < 3:
            first = rng.randrange(len(source.text) - prompt)
            prompts.append([int(token) for token in source.text[first : first + prompt]])
        else:
            prompts.append(source.task_row(rng, prompt)[0][:prompt])
    engine = LLM(HERE / "target", dtype="float32", max_num_seqs=64, max_model_len=512)
    sampling = [
        SamplingParams(max_tokens=length + 1 - prompt, temperature=0.8 * (row % 2), seed=row, ignore_eos=True)
        for row in range(rows)
    ]
    outputs = engine.generate(prompts, sampling)
    ids = np.array([p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)], np.int64)
    np.save(work / "own_text.npy", ids)
    print(f"{ids.shape[0]} rows of {ids.shape[1]} tokens")


def train(drafter: Drafter, work: Path, device: str, action: str, limit: int | None) -> None:
    r, target = drafter.recipe, load_target(device)
    torch.manual_seed(r.seed)
    module = drafter.make(target).to(device)
    matrices = [p for p in module.parameters() if p.ndim == 2]
    others = [p for p in module.parameters() if p.ndim != 2]
    align = action == "align"
    lr, total = (r.align_lr, r.align_steps) if align else (r.lr, r.steps)
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint, first, log = work / f"{drafter.name}_{action}.pt", 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        module.load_state_dict(state["module"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        first, log = state["step"], state["log"]
    elif align:
        begun = torch.load(work / f"{drafter.name}_train.pt", map_location=device, weights_only=True)
        module.load_state_dict(begun["module"])
    rows = base.Rows(base.RECIPES["target"], HERE / "target" / "tokenizer.json")
    own = torch.from_numpy(np.load(work / "own_text.npy")) if (work / "own_text.npy").exists() else None
    if align and own is None:
        raise SystemExit("align: no text of the target's own: run `outputs` first")
    held = None if own is None else own[: 2 * HELD : 2].to(device)  # greedy rows, which align leaves out
    began = time.time()
    bar = tqdm(range(first, total), initial=first, total=total, mininterval=5)
    for step in bar:
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = lr * base.schedule(step, total)
        if align and own is not None:
            drawn = np.random.default_rng(r.seed + step).integers(2 * HELD, len(own), r.rows)
            ids, weight = own[drawn][:, :-1], torch.ones(r.rows, own.shape[1] - 1)
        else:
            ids, _, weight = rows.step(10_000 + step, r.rows, r.length)
        with torch.autocast(device, torch.bfloat16, enabled=r.mixed):
            found, wanted = drafter.passes(module, target, ids.to(device), r.ahead)
        loss = loss_of(found, wanted, weight.to(device), r.decay)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        log.append([step, loss.item(), None])
        stop = bool(limit and time.time() - began > limit)
        if step % 50 == 49 or step + 1 == total or stop:
            if held is not None:
                log[-1][2] = accepted(drafter, module, target, held[:, :-1])
            print(f"step {step + 1}: loss {np.mean([x[1] for x in log[-50:]]):.3f}, right {log[-1][2]}", flush=True)
            state = {"module": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"step": step + 1, "log": log}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
        if stop:
            print(f"stopped after {limit} s; run again to go on")
            return


def export(drafter: Drafter, work: Path) -> None:
    """Writes its folder: config.json, bf16 safetensors, and training.json with what was measured on the way."""
    from safetensors.torch import save_file

    out, r = HERE / drafter.name, drafter.recipe
    out.mkdir(exist_ok=True)
    found = {
        action: torch.load(work / f"{drafter.name}_{action}.pt", weights_only=True) for action in ("train", "align")
    }
    target, held = load_target("cpu"), torch.from_numpy(np.load(work / "own_text.npy"))[: 2 * HELD : 2]
    rates = {}
    for action, state in found.items():
        module = drafter.make(target)
        module.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in state["module"].items()})
        rates[action] = [round(rate, 4) for rate in accepted(drafter, module, target, held[:, :-1])]
    tensors = {
        drafter.name_in_checkpoint(name): value.to(torch.bfloat16).contiguous()
        for name, value in found["align"]["module"].items()
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    config = drafter.config(json.loads((HERE / "target" / "config.json").read_text()))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    record = {
        "recipe": asdict(r),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "steps": {action: state["step"] for action, state in found.items()},
        "loss_mean_of_last_50": {
            action: round(float(np.mean([entry[1] for entry in state["log"][-50:]])), 4)
            for action, state in found.items()
        },
        "held_out": f"{HELD} rows of the target's own greedy text, which align does not see and which repeats itself",
        "guess_right_where_those_before_were": {"before_alignment": rates["train"], "after": rates["align"]},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def main(drafter: Drafter, description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "outputs", "align", "export"))
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="checkpoints (ignored by git)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=int, help="stop after this long, with a checkpoint")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    if options.action == "outputs":
        own_text(options.work)
    elif options.action == "export":
        export(drafter, options.work)
    else:
        train(drafter, options.work, options.device, options.action, options.seconds)
