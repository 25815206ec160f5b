# honest: dataclass, type hints, generics, pattern matching, decorators, helpers in a cell of their own

# %% first
from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def logged(f: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(f)
    def inner(*args: object, **kwargs: object) -> T:
        return f(*args, **kwargs)

    return inner

# %% Window
@dataclass
class Window(Generic[T]):
    size: int
    rows: deque[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = deque(maxlen=self.size)

    @logged
    def append(self, x: torch.Tensor) -> None:
        self.rows.append(x.clone())

    def mean(self) -> torch.Tensor:
        match list(self.rows):
            case [one]:
                return one
            case many:
                return torch.stack(many).mean(0)

    def __len__(self) -> int:
        return len(self.rows)


if __name__ == "__main__":
    w = Window(2)
    w.append(torch.ones(2))
    assert len(w) == 1
