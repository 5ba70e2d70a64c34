"""Bounds the memory of streams that can go on elsewhere: where it is full, the one that holds most
loses its place."""

from typing import Protocol

MAX_SHARE = 1 / 16
"""Of all streams' room, what one may take."""


class Holder(Protocol):
    @property
    def is_behind(self) -> bool: ...

    def give_up(self) -> None: ...


class Room:
    def __init__(self, max_bytes: int) -> None:
        self._left, self._most = max_bytes, int(max_bytes * MAX_SHARE)
        self._taken: dict[Holder, int] = {}

    def taken(self, holder: Holder) -> int:
        return self._taken.get(holder, 0)

    def take(self, holder: Holder, num_bytes: int) -> bool:
        total = self.taken(holder) + num_bytes
        if total > self._most:
            return False
        while num_bytes > self._left:
            others = [one for one in self._taken if one is not holder and not one.is_behind]
            largest = max(others, key=lambda one: self._taken[one], default=None)
            if largest is None or self._taken[largest] <= total:
                return False
            largest.give_up()
        self._left -= num_bytes
        self._taken[holder] = total
        return True

    def give_back(self, holder: Holder) -> None:
        self._left += self._taken.pop(holder, 0)
