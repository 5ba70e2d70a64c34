"""Things with several users, given back after the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from vllm_commext.nixl.log import RateLimitedLog

_log = RateLimitedLog()


class Counted:
    """Something with several users; made with one user, and given back after the last one."""

    num_users = 1
    _give_back: Callable[[], None]

    def hold(self) -> Self:
        self.num_users += 1
        return self

    def drop(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self._give_back()


class RefCounted(Counted):
    """A value that NIXL has made, and how it is given back."""

    def __init__(self, value: Any, give_back: Callable[[], None]) -> None:
        self.value = value
        self._give_back = partial(run_logged, give_back)


def run_logged(give_back: Callable[[], None]) -> None:
    try:
        give_back()
    except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer may be gone
        _log.warning("give back", f"NIXL failed to release a removed peer's resources: {error}")
