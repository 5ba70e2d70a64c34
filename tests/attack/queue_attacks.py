"""What strangers may send to the port of a message queue between hosts."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from tests.attack.judge import Attack, Victim
from tests.attack.queue_victim import QueueVictim, queue
from tests.kit.ports import LOOPBACK

SECONDS = 6.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
SUBSCRIPTIONS = b"".join(b"\x00\x05\x01" + number.to_bytes(4, "little") for number in range(20_000))


def _all_the_time(say: Callable[[socket.socket], None]) -> Callable[[Victim], None]:
    """Connect to both ports over and over, and say it."""

    def assault(victim: Victim) -> None:
        assert isinstance(victim, QueueVictim)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for port in victim.ports:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((LOOPBACK, port), timeout=1) as attacker,
                ):
                    say(attacker)
            time.sleep(0.001)

    return assault


def _subscriptions(attacker: socket.socket) -> None:
    attacker.sendall(GREETING + READY)
    for _ in range(100):
        attacker.sendall(SUBSCRIPTIONS)


def _upstream(attacker: socket.socket) -> None:
    attacker.sendall(bytes(16 << 20))


def _almost(attacker: socket.socket) -> None:
    for _ in range(47):
        attacker.sendall(b"\0")
    attacker.recv(4096)


def _silent(victim: Victim) -> None:
    """More connections than the victim may have descriptors, kept for as long as it takes."""
    assert isinstance(victim, QueueVictim)
    held: list[socket.socket] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for port in victim.ports:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((LOOPBACK, port), timeout=0.1))
        if len(held) > 2000:
            time.sleep(0.01)
            held.pop(0).close()


ATTACKS = (
    Attack("queue-subscriptions", "queue", queue, _all_the_time(_subscriptions)),
    Attack("queue-upstream", "queue", queue, _all_the_time(_upstream)),
    Attack("queue-almost", "queue", queue, _all_the_time(_almost)),
    Attack("queue-churn", "queue", queue, _all_the_time(lambda _: None)),
    Attack("queue-silent", "queue", queue, _silent),
)
