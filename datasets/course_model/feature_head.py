"""Trains a feature head for the course target: one layer that drafts ahead from the target's own hidden states.

    python datasets/course_model/feature_head.py train      # distilled on the training rows
    python datasets/course_model/feature_head.py outputs    # the target continues training rows: its own text
    python datasets/course_model/feature_head.py align      # goes on, on that text
    python datasets/course_model/feature_head.py export     # bf16 safetensors in eagle/, and what was measured

The head of EAGLE (Li et al. 2024), with the loss of EAGLE-3 (2025): it is run several times in a row while it trains,
on its own features as when it drafts, and each time its distribution is drawn towards the target's (KL divergence).
At position p it sees the embedding of token p + 1 and the target's hidden state of p (after the last norm), and gives
what the target's hidden state of p + 1 might be; embedding and logits are the target's, and stay as they are.

distill.py has what this shares with other drafters.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import distill
import train as base


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
        other pass i to the position where its drafts lie, p - (j - i)."""
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


def passes(head: FeatureHead, target: base.CourseModel, ids: Tensor, ahead: int) -> tuple[list[Tensor], Tensor]:
    """As `Drafter.passes` says: draft j is made with j tokens of row r that the head was told, as if its drafts had
    been right."""
    with torch.no_grad():
        features, logits = distill.features_and_logits(target, ids)
    features, wanted = features[:, :-1], logits[:, 1:]
    embedded = target.embed(ids[:, 1:]).detach()
    seen, found = [], []
    for _ in range(ahead):
        out = head(embedded, features, target.cos, target.sin, seen)
        found.append(F.linear(out, target.embed.weight.detach()))
        features = F.pad(out, (0, 0, 1, 0))[:, :-1]
    return found, wanted


def new_head(target: base.CourseModel) -> FeatureHead:
    head = FeatureHead(replace(base.RECIPES["target"], num_layers=1))
    head.begin_from(target)
    return head


def name_in_checkpoint(key: str) -> str:
    """The layer and the last norm as in the target's."""
    if key in ("fc.weight", "embed_norm"):
        return {"fc.weight": "fc.weight", "embed_norm": "embed_norm.weight"}[key]
    return base.name_in_checkpoint(key.replace("layer.", "layers.0.", 1))


DRAFTER = distill.Drafter(
    name="eagle",
    recipe=distill.Recipe(),
    make=new_head,
    passes=passes,
    name_in_checkpoint=name_in_checkpoint,
    config=lambda target: (
        target | {"architectures": ["FeatureHead"], "layer_of": target["architectures"][0], "num_hidden_layers": 1}
    ),
)


if __name__ == "__main__":
    distill.main(DRAFTER, __doc__)
