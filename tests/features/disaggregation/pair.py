"""A sender, a receiver, and messages that are delivered when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference_impl.features.disaggregation.messages import Message
from reference_impl.features.disaggregation.protocol import Action, Check, Send, Times, Write
from reference_impl.features.disaggregation.receiver import Receiver
from reference_impl.features.disaggregation.sender import Sender

TIMES = Times(interval=1, lease=4, limit=30, credit=10, stop=5, unclaimed=20, attempts=3)
KEYS = [bytes([number]) * 32 for number in range(40)]


class Both:
    """Prefill worker P and decode worker D. Messages wait in `to_d` and `to_p`; other actions are kept in `done`."""

    def __init__(self, num_slots: int = 4, times: Times = TIMES):
        self.p, self.d, self.now = Sender(times), Receiver(times), 0.0
        self.to_d: list[Message] = []
        self.to_p: list[Message] = []
        self.done: list[Action] = []
        self.d.join("P", num_slots)

    def act(self, event: Callable[..., list[Action]], *args: Any, **fields: Any) -> list[Action]:
        """Feeds an event. Returns what it asks for besides messages."""
        actions = event(*args, now=self.now, **fields)
        for action in actions:
            if isinstance(action, Send):
                (self.to_d if action.peer == "D" else self.to_p).append(action.message)
        others = [action for action in actions if not isinstance(action, Send)]
        self.done += others
        return others

    def offer(self, name: str = "t", num_pages: int = 2, is_ready: bool = True) -> None:
        self.act(self.p.offer, name, "D", KEYS[:num_pages])
        if is_ready:
            self.ready(name, *range(num_pages))

    def ready(self, name: str, *indices: int) -> None:
        self.act(self.p.pages_ready, name, {index: 100 + index for index in indices})

    def deliver(self) -> None:
        """All messages, and those that they bring about."""
        while self.to_d or self.to_p:
            if self.to_d:
                self.act(self.d.received, "P", self.to_d.pop(0))
            if self.to_p:
                self.act(self.p.received, "D", self.to_p.pop(0))

    def take(self, kind: type) -> list[Any]:
        """Actions of a kind that were asked for since they were last taken."""
        found = [action for action in self.done if isinstance(action, kind)]
        self.done = [action for action in self.done if not isinstance(action, kind)]
        return found

    def write(self) -> None:
        """Ends all writes that were begun, well."""
        for write in self.take(Write):
            self.act(self.p.written, write.transfer, write.attempt, [index for index, _ in write.pages])

    def check(self, wrong: tuple[int, ...] = ()) -> None:
        for check in self.take(Check):
            right = {index: index not in wrong for index, _, _ in check.pages}
            self.act(self.d.checked, check.transfer, check.attempt, right)

    def go_on(self) -> None:
        """Everything that can be done, without time passing."""
        while self.to_d or self.to_p or any(isinstance(action, (Write, Check)) for action in self.done):
            self.deliver()
            self.write()
            self.check()

    def pass_time(self, seconds: float, only: str = "PD", deliver: bool = False) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            if "P" in only:
                self.act(self.p.tick)
            if "D" in only:
                self.act(self.d.tick)
            if deliver:
                self.deliver()

    @property
    def num_free(self) -> int:
        return len(self.d.free_slots("P"))


def kinds(values: list[Any]) -> list[str]:
    return [type(value).__name__ for value in values]
