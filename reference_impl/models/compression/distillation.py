"""What a small model, the student, learns from a large one: three losses (a draft that agrees more often is kept more).

    response    the teacher's own text is the right answer: only its tokens are needed, from anywhere
    logits      on given text, the teacher's whole distribution at each token (Hinton et al. 2015): more to learn from a
                token, and the teacher has to be at hand
    on-policy   the same on text that the student wrote (GKD, Agarwal et al. 2024): it learns where it will be

For speculative decoding the student is judged by how often its first token is the teacher's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def response(student: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats. student [rows, length, vocab_size], logits; tokens [rows, length]: what the teacher
    wrote after each."""
    return F.cross_entropy(student.flatten(0, 1).float(), tokens.flatten())


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher || student) in nats; logits [rows, length, vocab_size]. The student covers all that the teacher
    may say."""
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(student || teacher): the student says little that the teacher would not, and may leave out much."""
    return forward_kl(teacher, student)


@torch.no_grad()
def agreement(student: Tensor, teacher: Tensor) -> float:
    """The share of the tokens where both put the same one first: how often a greedy draft of one token is kept."""
    return float((student.argmax(-1) == teacher.argmax(-1)).float().mean())
