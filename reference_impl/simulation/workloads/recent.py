"""The last ids of a stream that does not end, in bounded memory."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The last ids and their values. values: of the last `most` ids that were put in."""

    def __init__(self, most: int):
        self.values: dict[str, T] = {}
        self._ids: deque[str] = deque()  # the first key of a dict that lost many is not found in O(1)
        self._most = most

    def put(self, id: str, value: T) -> None:
        self.values[id] = value
        self._ids.append(id)
        if len(self._ids) > self._most:
            self.values.pop(self._ids.popleft(), None)
