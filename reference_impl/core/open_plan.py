"""A step's plan under construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from reference_impl.interfaces import Request, Row

Shares = list[tuple[Request, int]]  # how many tokens each request may compute, best rank first

row = partial(tuple.__new__, Row)  # as Row(*values), in half the time: one for each row of each step


@dataclass
class OpenPlan:
    """What is granted stays: a request that has tokens in this plan is not preempted by it."""

    budget: int  # tokens that may still be granted
    granted: list[tuple[Request, int, int, tuple[int, ...]]] = field(default_factory=list)  # tokens; drafts, as of Row
    preempted: list[str] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)  # as of StepPlan

    def grant(self, request: Request, num_tokens: int, num_drafts: int = 0, drafts: tuple[int, ...] = ()) -> None:
        self.granted.append((request, num_tokens, num_drafts, drafts))
        self.budget -= num_tokens + num_drafts
