"""Trains the course models: a target, and a draft an eighth of its size, on data every Python has.

    python datasets/course_model/train.py tokenizer
    python datasets/course_model/train.py train target
    python datasets/course_model/train.py train draft
    python datasets/course_model/train.py export            # bf16 safetensors next to this file
    python datasets/course_model/evaluate.py                # writes the model card

Resumable (a checkpoint every few hundred steps; step n always sees the same rows), seeded, on a CPU
or a GPU. Matrices inside the layers are trained with Muon, the rest with AdamW; the learning rate
warms up, stays, and falls linearly to zero over the last 40 % of the steps.
Architecture: Qwen3 (RoPE, grouped-query attention, RMS norm on queries and keys, SwiGLU, tied embeddings).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import corpus  # noqa: E402
import tasks  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 4096
ROPE_THETA = 10_000.0
MAX_POSITIONS = 2048
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Recipe:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    lr: float
    phases: tuple[tuple[int, int, int], ...]  # (steps, rows, row length in tokens)
    text_share: float = 0.55  # rows of running text; the others are packed with tasks
    seed: int = 20260


RECIPES = {
    "target": Recipe(256, 8, 4, 2, 64, 768, 3e-3, ((700, 32, 256), (450, 16, 512), (200, 8, 1024))),
    "draft": Recipe(128, 2, 2, 1, 64, 256, 4e-3, ((700, 32, 256), (400, 16, 512), (100, 8, 1024))),
}


# --- model ---------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self, r: Recipe):
        super().__init__()
        self.r = r
        q, kv = r.num_heads * r.head_dim, r.num_kv_heads * r.head_dim
        self.input_norm = nn.Parameter(torch.ones(r.hidden_size))
        self.post_norm = nn.Parameter(torch.ones(r.hidden_size))
        self.q_norm = nn.Parameter(torch.ones(r.head_dim))
        self.k_norm = nn.Parameter(torch.ones(r.head_dim))
        self.q_proj = nn.Linear(r.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(r.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(r.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, r.hidden_size, bias=False)
        self.gate_proj = nn.Linear(r.hidden_size, r.intermediate_size, bias=False)
        self.up_proj = nn.Linear(r.hidden_size, r.intermediate_size, bias=False)
        self.down_proj = nn.Linear(r.intermediate_size, r.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor] | None = None) -> Tensor:
        """attend: of queries, keys and values [rows, heads, length, head_dim] each; None: causal."""
        r, (rows, length, _) = self.r, x.shape
        h = F.rms_norm(x, x.shape[-1:], self.input_norm, NORM_EPS)
        q = self.q_proj(h).view(rows, length, r.num_heads, r.head_dim)
        k = self.k_proj(h).view(rows, length, r.num_kv_heads, r.head_dim)
        v = self.v_proj(h).view(rows, length, r.num_kv_heads, r.head_dim)
        q = rotate(F.rms_norm(q, (r.head_dim,), self.q_norm.to(q.dtype), NORM_EPS), cos, sin)
        k = rotate(F.rms_norm(k, (r.head_dim,), self.k_norm.to(k.dtype), NORM_EPS), cos, sin)
        group = r.num_heads // r.num_kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        o = F.scaled_dot_product_attention(*heads, is_causal=True) if attend is None else attend(*heads)
        x = x + self.o_proj(o.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, x.shape[-1:], self.post_norm, NORM_EPS)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[: x.shape[1], None].to(x.dtype), sin[: x.shape[1], None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class CourseModel(nn.Module):
    def __init__(self, r: Recipe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, r.hidden_size)
        self.layers = nn.ModuleList(Layer(r) for _ in range(r.num_layers))
        self.norm = nn.Parameter(torch.ones(r.hidden_size))
        frequency = ROPE_THETA ** (-torch.arange(0, r.head_dim, 2) / r.head_dim)
        angle = torch.outer(torch.arange(MAX_POSITIONS).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=0.02 / (2 * r.num_layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, NORM_EPS), self.embed.weight)


# --- data ----------------------------------------------------------------------------------------
def build_tokenizer(out: Path) -> None:
    """Byte-level BPE with single digits (numbers are copied digit by digit), trained on the training split."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    train, _ = corpus.split()
    rng = random.Random(0)
    texts = [text for _, text in train]
    texts += ["\n".join(tasks.json_call(rng)) for _ in range(4000)] + [
        "\n".join(tasks.copying(rng)) for _ in range(4000)
    ]
    tokenizer = Tokenizer(models.BPE())
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": (HERE / "chat_template.jinja").read_text(),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Rows:
    """Rows of (input, target, weight), drawn anew for each step from (seed, step): resuming repeats nothing."""

    def __init__(self, r: Recipe, tokenizer_file: Path):
        from tokenizers import Tokenizer

        self.r, self.tokenizer = r, Tokenizer.from_file(str(tokenizer_file))
        self.end, self.start, self.stop = (self.tokenizer.token_to_id(t) for t in SPECIAL)
        train, held_out = corpus.split()
        self.text = self._stream(train)
        self.held_out = self._stream(held_out)
        self.pairs = corpus.docstring_pairs(train)
        self.lines = [line for _, t in train for line in t.splitlines() if 10 < len(line) < 90]

    def _stream(self, documents: list[corpus.Document]) -> np.ndarray:
        encoded = self.tokenizer.encode_batch_fast([t for _, t in documents], add_special_tokens=False)
        return np.concatenate([np.array([*e.ids, self.end], np.int64) for e in encoded])

    def filler(self, rng: random.Random, num_tokens: int) -> str:
        first = rng.randrange(len(self.lines) - 200)
        out, budget = [], num_tokens
        for line in self.lines[first : first + 200]:
            budget -= len(line) // 3 + 1
            if budget < 0:
                break
            out.append(line)
        return "\n".join(out)

    def task(self, rng: random.Random, room: int) -> tasks.Task:
        kind = rng.random()
        if kind < 0.5:
            return tasks.retrieval(rng, self.filler, int(2 ** rng.uniform(3, np.log2(max(16, room - 60)))))
        if kind < 0.68:
            return tasks.json_call(rng)
        if kind < 0.84:
            return tasks.copying(rng)
        name, doc = rng.choice(self.pairs)
        return f"What does {name} do?", doc

    def task_row(self, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weight: list[float] = []
        while len(ids) < length:
            prompt, answer = self.task(rng, min(length, length - len(ids) + 40))
            head = self.tokenizer.encode(f"user\n{prompt}", add_special_tokens=False).ids
            middle = self.tokenizer.encode("\n", add_special_tokens=False).ids
            role = self.tokenizer.encode("assistant\n", add_special_tokens=False).ids
            tail = self.tokenizer.encode(answer, add_special_tokens=False).ids
            question = [self.start, *head, self.stop, *middle, self.start, *role]
            ids += [*question, *tail, self.stop, *middle, self.end]
            # Made-up words in a prompt cannot be predicted: learn from them a little, from answers fully.
            weight += [0.1] * len(question) + [1.0] * (len(tail) + 1) + [0.1] * (len(middle) + 1)
        return ids[: length + 1], weight[: length + 1]

    def step(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = np.zeros((rows, length + 1), np.int64)
        weight = np.zeros((rows, length + 1), np.float32)
        num_text = round(rows * self.r.text_share)
        for row in range(rows):
            rng = random.Random(self.r.seed * 1_000_003 + step * 1009 + row)
            if row < num_text:
                first = rng.randrange(len(self.text) - length - 1)
                ids[row], weight[row] = self.text[first : first + length + 1], 1.0
            else:
                i, w = self.task_row(rng, length)
                ids[row, : len(i)], weight[row, : len(w)] = i, w
        t = torch.from_numpy(ids)
        return t[:, :-1], t[:, 1:], torch.from_numpy(weight)[:, 1:]


# --- training ------------------------------------------------------------------------------------
def schedule(step: int, total: int) -> float:
    return min(1.0, (step + 1) / 50, max(0.0, (total - step) / (0.4 * total)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], device: str) -> Tensor:
    ids, target, weight = (t.to(device) for t in batch)
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum()


def held_out_loss(model: nn.Module, rows: Rows, device: str, windows: int = 24, length: int = 512) -> float:
    starts = np.linspace(0, len(rows.held_out) - length - 1, windows).astype(int)
    ids = torch.from_numpy(np.stack([rows.held_out[s : s + length + 1] for s in starts]))
    with torch.no_grad():
        losses = [
            float(loss_of(model, (i[:, :-1], i[:, 1:], torch.ones_like(i[:, 1:], dtype=torch.float)), device))
            for i in ids.split(8)
        ]
    return sum(losses) / len(losses)


def train(name: str, work: Path, device: str, use_compile: bool, limit: int | None) -> None:
    r = RECIPES[name]
    rows = Rows(r, HERE / name / "tokenizer.json")
    torch.manual_seed(r.seed)
    model = CourseModel(r).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or n.startswith("embed")]
    optimizers = [
        torch.optim.Muon(matrices, lr=r.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=r.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps = [(n, length) for count, n, length in r.phases for _ in range(count)]
    total, log, first = len(steps), [], 0
    checkpoint = work / f"{name}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        first, log = state["step"], state["log"]
    step_loss = torch.compile(loss_of, dynamic=False) if use_compile else loss_of
    size = sum(p.numel() for p in model.parameters())
    tokens = sum(n * length for n, length in steps)
    print(
        f"{name}: {size / 1e6:.2f} M parameters, {total} steps, {tokens / 1e6:.1f} M tokens; "
        f"running text: {len(rows.text) / 1e6:.2f} M tokens",
        flush=True,
    )

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "step": step,
            "log": log,
        }
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)  # never a half-written checkpoint

    began = time.time()
    bar = tqdm(range(first, total), initial=first, total=total, mininterval=5)
    for step in bar:
        n, length = steps[step]
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = r.lr * schedule(step, total)
        loss = step_loss(model, rows.step(step, n, length), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        log.append([step, float(loss), None])
        if step % 100 == 99 or step + 1 == total:
            log[-1][2] = held_out_loss(model, rows, device)
            bar.set_postfix(loss=f"{log[-1][1]:.3f}", held_out=f"{log[-1][2]:.3f}")
            save(step + 1)
        if limit and time.time() - began > limit:
            save(step + 1)
            print(f"stopped after {limit} s at step {step + 1}; run again to go on")
            return
    plot(name, log)


def plot(name: str, log: list) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    loss = np.array([entry[1] for entry in log])
    smooth = np.convolve(loss, np.ones(25) / 25, "valid")
    axes.plot(np.arange(len(smooth)) + 24, smooth, color="#0072B2", label="training mix (mean of 25 steps)")
    held = [(entry[0], entry[2]) for entry in log if entry[2] is not None]
    axes.plot(*zip(*held, strict=True), "o-", color="#D55E00", markersize=3, label="held-out text")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=f"Course model, {name}")
    axes.legend()
    figure.savefig(HERE / name / "loss.png", dpi=80, bbox_inches="tight")


# --- export --------------------------------------------------------------------------------------
def name_in_checkpoint(key: str) -> str:
    """Hugging Face's name of a tensor of `CourseModel`."""
    if key in ("embed.weight", "norm"):
        return {"embed.weight": "model.embed_tokens.weight", "norm": "model.norm.weight"}[key]
    key = "model." + key
    for ours, theirs in (
        ("input_norm", "input_layernorm.weight"),
        ("post_norm", "post_attention_layernorm.weight"),
        ("q_norm", "self_attn.q_norm.weight"),
        ("k_norm", "self_attn.k_norm.weight"),
    ):
        key = key.replace(ours, theirs)
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        key = key.replace(f".{part}.", f".self_attn.{part}.")
    for part in ("gate_proj", "up_proj", "down_proj"):
        key = key.replace(f".{part}.", f".mlp.{part}.")
    return key


def export(name: str, work: Path) -> None:
    """Writes a Hugging Face folder: config, bf16 safetensors in shards of at most 15 MB, generation config."""
    from safetensors.torch import save_file

    r, out = RECIPES[name], HERE / name
    checkpoint = torch.load(work / f"{name}.pt", map_location="cpu", weights_only=True)
    tensors = {}
    for key, value in checkpoint["model"].items():
        tensors[name_in_checkpoint(key)] = value.to(torch.bfloat16).contiguous()
    shards: list[dict[str, Tensor]] = [{}]
    for key, value in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) + value.nbytes > 15e6:
            shards.append({})
        shards[-1][key] = value
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], out / "model.safetensors", {"format": "pt"})
    else:
        index = {}
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, out / file, {"format": "pt"})
            index |= dict.fromkeys(shard, file)
        total = sum(t.nbytes for t in tensors.values())
        (out / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n"
        )
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes 0600
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": r.hidden_size,
        "intermediate_size": r.intermediate_size,
        "num_hidden_layers": r.num_layers,
        "num_attention_heads": r.num_heads,
        "num_key_value_heads": r.num_kv_heads,
        "head_dim": r.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    train_documents, held_out_documents = corpus.split()
    log = checkpoint["log"]
    record = {
        "recipe": asdict(r),
        "steps": checkpoint["step"],
        "tokens": sum(steps * rows * length for steps, rows, length in r.phases),
        "final_loss": float(np.mean([entry[1] for entry in log[-50:]])),
        "held_out_loss": [[entry[0] + 1, round(entry[2], 4)] for entry in log if entry[2] is not None],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "training_documents": len(train_documents),
        "training_sha256": corpus.fingerprint(train_documents),
        "held_out_documents": [name for name, _ in held_out_documents],
        "held_out_sha256": corpus.fingerprint(held_out_documents),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    plot(name, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("tokenizer", "train", "export"))
    parser.add_argument("model", nargs="?", choices=tuple(RECIPES))
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="checkpoints (ignored by git)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: about a third faster, needs a C++ compiler"
    )
    parser.add_argument("--seconds", type=int, help="stop after this long, with a checkpoint")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    names = [options.model] if options.model else list(RECIPES)
    for name in names:
        if options.action == "tokenizer":
            build_tokenizer(HERE / name)
        elif options.action == "train":
            train(name, options.work, options.device, options.compile, options.seconds)
        else:
            export(name, options.work)
    if options.action == "tokenizer" and options.model is None:  # one tokenizer for both
        first, *rest = names
        for name in rest:
            shutil.copy(HERE / first / "tokenizer.json", HERE / name / "tokenizer.json")


if __name__ == "__main__":
    main()
