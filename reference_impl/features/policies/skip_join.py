"""Levels by the length of the prompt: short prompts do not wait for long ones, and no output length is guessed."""

from __future__ import annotations

from reference_impl.features.policies.estimates import at_least_0
from reference_impl.interfaces import Request


class SkipJoin:
    """A request joins the level of its prompt: level 0 up to `quantum` tokens, 1 up to twice as many, 2 up to four
    times as many, and so on. Levels go in order, and the requests of a level in order of arrival; a second of waiting
    is worth `aging` levels.

    Source: FastServe's skip-join multi-level feedback queue (Wu et al. 2023). There, too, a request skips the levels
    whose quantum would be over before its first token; it is then moved down as it writes, which a rank that is given
    once cannot do, and moved up when it has waited for long: that is the aging.

    A request of level l goes before one of level m < l that arrives more than (l - m) / aging seconds after it. With
    aging 0 long prompts starve while shorter ones keep coming. Preemptive, like FastServe, within the same bound.
    """

    def __init__(self, quantum: int = 256, aging: float = 0.1, preemptive: bool = True):
        if not isinstance(quantum, int) or quantum < 1:
            raise ValueError(f"quantum (tokens): expected a whole number, at least 1, got {quantum!r}")
        self.quantum, self.preemptive = quantum, preemptive
        self.aging = at_least_0("aging (levels per second)", aging)

    def rank(self, request: Request) -> float:
        return self.level(request) + self.aging * request.arrival

    def level(self, request: Request) -> int:
        """The smallest l for which the prompt has at most quantum * 2**l tokens."""
        num_quanta = -(-request.num_prompt_tokens // self.quantum)  # ceiling
        return max(0, num_quanta - 1).bit_length()

    def finished(self, request: Request) -> None:
        pass
