"""Two network namespaces with a link between them, where the machine permits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

COMMAND_SECONDS = 10.0
RATE = "2mbit"


class NetworkError(RuntimeError):
    """A command of ``ip`` or ``tc`` failed."""


@dataclass(frozen=True)
class Link:
    """A pair of virtual network devices with IPv4 addresses; the far one is in the namespace."""

    namespace: str
    near: str
    far: str
    near_address: str
    far_address: str

    def enter(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._set_far("down")
        try:
            yield
        finally:
            self._set_far("up")

    @contextlib.contextmanager
    def throttled(self) -> Iterator[None]:
        """``RATE`` in both directions."""
        ends = ((self.near, ()), (self.far, tuple(self.enter())))
        shaping = ("tbf", "rate", RATE, "burst", "16kb", "latency", "200ms")
        for device, prefix in ends:
            _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *shaping)
        try:
            yield
        finally:
            for device, prefix in ends:
                _run(*prefix, "tc", "qdisc", "del", "dev", device, "root")

    def _set_far(self, state: str) -> None:
        _run(*self.enter(), "ip", "link", "set", self.far, state)


@contextlib.contextmanager
def namespace_link() -> Iterator[Link]:
    """A link as long as the context lasts.

    Raises:
        NetworkError: the machine does not permit it."""
    number = os.getpid()
    subnet = f"10.213.{number % 250}"
    link = Link(
        f"commext-chaos-{number}", f"cx{number}a", f"cx{number}b", f"{subnet}.1", f"{subnet}.2"
    )
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NetworkError("ip and tc are not installed")
    _run("ip", "netns", "add", link.namespace)
    try:
        peer = ("peer", "name", link.far, "netns", link.namespace)
        _run("ip", "link", "add", link.near, "type", "veth", *peer)
        _run("ip", "address", "add", f"{link.near_address}/24", "dev", link.near)
        _run("ip", "link", "set", link.near, "up")
        inside = link.enter()
        _run(*inside, "ip", "address", "add", f"{link.far_address}/24", "dev", link.far)
        _run(*inside, "ip", "link", "set", link.far, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield link
    finally:
        _run("ip", "netns", "delete", link.namespace)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
