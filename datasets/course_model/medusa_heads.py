"""Trains Medusa heads for the course target: four small heads that draft ahead from one hidden state of the target.

    python datasets/course_model/medusa_heads.py train      # distilled on the training rows
    python datasets/course_model/medusa_heads.py outputs    # the target continues training rows: its own text
    python datasets/course_model/medusa_heads.py align      # goes on, on that text
    python datasets/course_model/medusa_heads.py export     # bf16 safetensors in medusa/, and what was measured

The heads of Medusa (Cai et al. 2024), on a target that stays as it is (their "Medusa-1"). Head j of position p is given
the target's hidden state of p (after the last norm) and nothing else, and says what token p + 2 + j might be:
lm_head(h + SiLU(W_j h + b_j)). Theirs have an lm_head each; these share the target's. Trained as distill.py says,
towards the target's distribution, where theirs learn from the text's next tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import distill
import train as base

RECIPE = distill.Recipe(steps=300, align_steps=400, rows=6, lr=2e-2, align_lr=1e-2)


class MedusaHeads(nn.Module):
    """At first all say what lm_head says of h: W and b are 0."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, h: Tensor, j: int) -> Tensor:
        """h [..., hidden_size] -> the same shape."""
        return h + F.silu(self.heads[j](h))


def passes(heads: MedusaHeads, target: base.CourseModel, ids: Tensor, ahead: int) -> tuple[list[Tensor], Tensor]:
    """As `Drafter.passes` says."""
    with torch.no_grad():
        features, logits = distill.features_and_logits(target, ids)
    found, features = [], features[:, :-1]
    for j in range(ahead):
        found.append(F.linear(heads(features, j), target.embed.weight.detach()))
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]
    return found, logits[:, 1:]


DRAFTER = distill.Drafter(
    name="medusa",
    recipe=RECIPE,
    make=lambda target: MedusaHeads(target.norm.numel(), RECIPE.ahead),
    passes=passes,
    name_in_checkpoint=lambda key: key,
    config=lambda target: (
        {"architectures": ["MedusaHeads"], "num_heads": RECIPE.ahead}
        | {name: target[name] for name in ("hidden_size", "vocab_size", "torch_dtype")}
    ),
)


if __name__ == "__main__":
    distill.main(DRAFTER, __doc__)
