"""Trains a feature head for the course target: one layer that guesses ahead from the target's own hidden states.

    python datasets/course_model/feature_head.py train      # distilled on the training rows
    python datasets/course_model/feature_head.py outputs    # the target continues training rows: its own text
    python datasets/course_model/feature_head.py align      # goes on, on that text
    python datasets/course_model/feature_head.py export     # bf16 safetensors in eagle/, and what was measured

The head of EAGLE (Li et al. 2024), with the loss of EAGLE-3 (2025): it is run several times in a row while it trains,
on its own features as when it guesses, and each time its distribution is drawn towards the target's (KL divergence).
At position p it sees the embedding of token p + 1 and the target's hidden state of p (after the last norm), and gives
what the target's hidden state of p + 1 might be; embedding and logits are the target's, and stay as they are.

Resumable and seeded, as train.py is; minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

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
    ahead: int = 4  # guesses in a row that it is trained for
    decay: float = 0.8  # weight of each guess against the one before it
    lr: float = 3e-3
    align_lr: float = 8e-4
    seed: int = 777


class FeatureHead(nn.Module):
    def __init__(self, r: base.Recipe):
        super().__init__()
        self.embed_norm = nn.Parameter(torch.ones(r.hidden_size))
        self.fc = nn.Linear(2 * r.hidden_size, r.hidden_size, bias=False)
        self.layer = base.Layer(r)
        self.norm = nn.Parameter(torch.ones(r.hidden_size))

    def begin_from(self, target: base.CourseModel) -> None:
        """Features pass unchanged, then the target's last layer and norm."""
        size = self.norm.numel()
        with torch.no_grad():
            nn.init.normal_(self.fc.weight, std=0.02)
            self.fc.weight[:, size:] += torch.eye(size)
            self.layer.load_state_dict(target.layers[-1].state_dict())
            self.norm.copy_(target.norm)

    def forward(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, seen: list) -> Tensor:
        """embedded, features [rows, length, hidden] -> the same shape. seen: keys and values of the passes before,
        to which this one's are appended: pass j of position p attends to those of the first up to p - j, and of each
        other pass i to the position where its guesses lie, p - (j - i)."""
        e = F.rms_norm(embedded, embedded.shape[-1:], self.embed_norm, base.NORM_EPS)
        x = self.layer(self.fc(torch.cat((e, features), -1)), cos, sin, partial(_attend, seen))
        return F.rms_norm(x, x.shape[-1:], self.norm, base.NORM_EPS)


def _attend(seen: list, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [rows, heads, length, head_dim], of pass len(seen)."""
    seen.append((k, v))
    first_k, first_v = seen[0]
    nth, length, scale = len(seen) - 1, q.shape[2], q.shape[3] ** -0.5
    if nth == 0:
        return F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True)
    place = torch.arange(length, device=q.device)
    scores = (q @ first_k.transpose(2, 3)).float() * scale
    scores = scores.masked_fill(place[None, :] > place[:, None] - nth, -torch.inf)
    others = [(_back(k, nth - i), _back(v, nth - i)) for i, (k, v) in enumerate(seen[1:], 1)]
    own = torch.stack([(q * k).sum(-1).float() * scale for k, _ in others], -1)
    weights = torch.cat((scores, own), -1).softmax(-1).to(q.dtype)
    found = weights[..., :length] @ first_v
    for i, (_, v) in enumerate(others):
        found = found + weights[..., length + i, None] * v
    return found


def _back(x: Tensor, by: int) -> Tensor:
    """x [rows, heads, length, head_dim], shifted `by` positions to the right."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]


def features_and_logits(target: base.CourseModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = target.embed(ids)
    for layer in target.layers:
        x = layer(x, target.cos, target.sin)
    features = F.rms_norm(x, x.shape[-1:], target.norm, base.NORM_EPS)
    return features, F.linear(features, target.embed.weight)


def passes(head: FeatureHead, target: base.CourseModel, ids: Tensor, ahead: int) -> tuple[list[Tensor], Tensor]:
    """For guess j of each position the head's logits; and the target's. Entry [r, p] of guess j is of token p + 2, and
    made with j tokens of row r that the head was told (as if its guesses had been right), from the features of p - j.
    """
    with torch.no_grad():
        features, logits = features_and_logits(target, ids)
    features, wanted = features[:, :-1], logits[:, 1:]
    embedded = target.embed(ids[:, 1:]).detach()
    seen, found = [], []
    for _ in range(ahead):
        out = head(embedded, features, target.cos, target.sin, seen)
        found.append(F.linear(out, target.embed.weight.detach()))
        features = F.pad(out, (0, 0, 1, 0))[:, :-1]
    return found, wanted


def loss_of(head: FeatureHead, target: base.CourseModel, ids: Tensor, weight: Tensor, r: Recipe, device: str) -> Tensor:
    """The KL divergence from the target's distribution to the head's, over all guesses. weight [rows, length]."""
    with torch.autocast(device, torch.bfloat16):
        found, wanted = passes(head, target, ids, r.ahead)
    loss, share = torch.zeros((), device=device), 1.0
    log_p = wanted.float().log_softmax(-1)
    p, weight = log_p.exp(), weight[:, 1:]
    entropy = -(p * log_p).sum(-1)
    for j, own in enumerate(found):
        # of a row's first j positions there is no guess made j passes before
        kl = torch.einsum("rlv,rlv->rl", p, -own.float().log_softmax(-1)) - entropy
        loss = loss + share * (kl * weight)[:, j:].sum() / weight[:, j:].sum()
        share *= r.decay
    return loss


@torch.no_grad()
def accepted(head: FeatureHead, target: base.CourseModel, ids: Tensor, r: Recipe) -> list[float]:
    """ids [rows, length]: prompts of the training rows and the target's own greedy text behind them. In that text, how
    often guess j is right where those before it were."""
    head.eval()
    found, wanted = passes(head, target, ids, r.ahead)
    right, best = torch.ones(wanted.shape[:2], dtype=torch.bool, device=ids.device), wanted.argmax(-1)
    rates = []
    for j, own in enumerate(found):
        before = F.pad(right, (1, 0))[:, :-1] if j else right
        now = own.argmax(-1) == best
        at = before[:, PROMPT:]
        rates.append(float((now[:, PROMPT:] & at).sum() / at.sum()))
        right = before & now
    head.train()
    return rates


def new_head() -> FeatureHead:
    return FeatureHead(replace(base.RECIPES["target"], num_layers=1))


def load_target(device: str) -> base.CourseModel:
    """With the weights that train.py exported."""
    from safetensors.torch import load_file

    model = base.CourseModel(base.RECIPES["target"])
    tensors = load_file(HERE / "target" / "model.safetensors")
    model.load_state_dict({key: tensors[base.name_in_checkpoint(key)].float() for key in model.state_dict()})
    return model.to(device).requires_grad_(False)


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


def train(work: Path, device: str, action: str, limit: int | None) -> None:
    r, target = Recipe(), load_target(device)
    torch.manual_seed(r.seed)
    head = new_head()
    head.begin_from(target)
    head.to(device)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    align = action == "align"
    lr, total = (r.align_lr, r.align_steps) if align else (r.lr, r.steps)
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint, first, log = work / f"head_{action}.pt", 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        head.load_state_dict(state["head"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        first, log = state["step"], state["log"]
    elif align:
        head.load_state_dict(torch.load(work / "head_train.pt", map_location=device, weights_only=True)["head"])
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
        loss = loss_of(head, target, ids.to(device), weight.to(device), r, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        log.append([step, loss.item(), None])
        stop = bool(limit and time.time() - began > limit)
        if step % 50 == 49 or step + 1 == total or stop:
            if held is not None:
                log[-1][2] = accepted(head, target, held[:, :-1], r)
            print(f"step {step + 1}: loss {np.mean([x[1] for x in log[-50:]]):.3f}, right {log[-1][2]}", flush=True)
            state = {"head": head.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"step": step + 1, "log": log}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
        if stop:
            print(f"stopped after {limit} s; run again to go on")
            return


def export(work: Path) -> None:
    """Writes eagle/: config.json, bf16 safetensors, and training.json with what was measured on the way."""
    from safetensors.torch import save_file

    out, r = HERE / "eagle", Recipe()
    out.mkdir(exist_ok=True)
    found = {action: torch.load(work / f"head_{action}.pt", weights_only=True) for action in ("train", "align")}
    target, held = load_target("cpu"), torch.from_numpy(np.load(work / "own_text.npy"))[: 2 * HELD : 2]
    rates = {}
    for action, state in found.items():
        head = new_head()
        head.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in state["head"].items()})
        rates[action] = [round(rate, 4) for rate in accepted(head, target, held[:, :-1], r)]
    tensors = {}
    for name, value in found["align"]["head"].items():
        tensors[_name_in_checkpoint(name)] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    config = json.loads((HERE / "target" / "config.json").read_text())
    config |= {"architectures": ["FeatureHead"], "layer_of": config["architectures"][0], "num_hidden_layers": 1}
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


def _name_in_checkpoint(key: str) -> str:
    """The layer and the last norm as in the target's."""
    if key in ("fc.weight", "embed_norm"):
        return {"fc.weight": "fc.weight", "embed_norm": "embed_norm.weight"}[key]
    return base.name_in_checkpoint(key.replace("layer.", "layers.0.", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "outputs", "align", "export"))
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="checkpoints (ignored by git)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=int, help="stop after this long, with a checkpoint")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    if options.action == "outputs":
        own_text(options.work)
    elif options.action == "export":
        export(options.work)
    else:
        train(options.work, options.device, options.action, options.seconds)


if __name__ == "__main__":
    main()
