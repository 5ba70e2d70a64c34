"""What strangers may send to a side channel, to a worker's NIXL agent, and to the wakeup socket."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from functools import partial

from tests.attack.judge import Attack, Victim
from tests.attack.side_victim import ENGINE, SECRET, SideVictim, StepVictim, layout_of, side_channel
from tests.kit.descriptions import description
from tests.kit.ports import LOOPBACK
from tests.unit.nixl.test_reuse_table import BLOCK
from vllm_commext.nixl.reuse import chain
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire import zmtp
from vllm_commext.nixl.wire.messages import Released

MAX_GROWTH_MIB = 16.0
SECONDS = 4.0
_PART = bytes([3]) + struct.pack(">Q", 4000) + b"x" * 4000
_DESCRIBE = wire.encode(wire.DescribeRequest(engine_id=ENGINE, tp_rank=0))


def _message(frame: bytes) -> bytes:
    return zmtp.header(len(frame)) + frame


def _find(number: int) -> bytes:
    keys = [f"{number:016x}{key:016x}" for key in range(wire.MAX_KEYS)]
    return _message(wire.encode(wire.FindStreams(keys=keys, wait_seconds=1.0)))


def _connect(victim: Victim, *, opens: bool = True) -> socket.socket:
    assert isinstance(victim, SideVictim)
    made = socket.create_connection((LOOPBACK, victim.port), 5.0, ("127.0.0.2", 0))
    if opens:
        made.sendall(zmtp.opening(zmtp.DEALER))
    made.setblocking(False)
    return made


def _connections(victim: Victim, number: int, *, opens: bool = True) -> list[socket.socket]:
    made: list[socket.socket] = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            made.append(_connect(victim, opens=opens))
    return made


def _pour(victim: Victim, data: bytes, number: int, *, reads: bool = True) -> None:
    """Send the same again and again on so many connections; those that are closed come anew.

    Raises:
        RuntimeError: nothing could be sent, so that nothing was attacked."""
    ones = _connections(victim, number)
    poller = select.poll()
    num_bytes = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for place, one in enumerate(ones):
            try:
                num_bytes += _exchange(one, data, reads=reads)
            except OSError:
                one.close()
                with contextlib.suppress(OSError):
                    ones[place] = _connect(victim)
        poller.poll(1)
    if not num_bytes:
        raise RuntimeError(f"nothing could be sent on any of {number} connections")


def _exchange(one: socket.socket, data: bytes, *, reads: bool) -> int:
    """Send as much as goes without waiting, read what is there; how many bytes were sent."""
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        num_bytes = one.send(data)
    with contextlib.suppress(BlockingIOError):
        if reads:
            one.recv(1 << 16)
    return num_bytes


def _kept(victim: Victim, data: bytes) -> None:
    """As many connections as there can be, with so many bytes on each, or not even a greeting."""
    ones = _connections(victim, 3000, opens=bool(data))
    _send_each(ones, itertools.repeat(data))
    time.sleep(SECONDS)


def _held_questions(victim: Victim) -> None:
    """As many questions as may be held, and a flood of the shortest frames beside them."""
    ones = _connections(victim, 500)
    _send_each(ones, [_find(number) for number in range(len(ones))])
    _pour(victim, _message(b"\xc0") * 200, 4)


def _replaced_questions(victim: Victim) -> None:
    ones = _connections(victim, 200)
    end = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < end:
        number += 1
        _send_each(ones, [_find(number * 1000 + one) for one in range(len(ones))])


def _reconnects(victim: Victim) -> None:
    """Some two thousand connections a second that begin and end."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for one in _connections(victim, 50):
            one.close()
        time.sleep(0.02)


def _send_each(ones: list[socket.socket], messages: Iterable[bytes]) -> None:
    for one, message in zip(ones, messages, strict=False):
        with contextlib.suppress(OSError):
            one.send(message)


def _notifications(victim: Victim) -> None:
    """A foreign NIXL agent: long names, many consumers, many requests."""
    from vllm_commext.nixl.config import ConnectorConfig
    from vllm_commext.nixl.transport.agent import NixlAgent

    assert isinstance(victim, SideVictim)
    metadata = victim.ask().agent_metadata
    agent = NixlAgent(ConnectorConfig(side_channel_host=LOOPBACK, side_channel_port=1))
    name = agent.add_peer(metadata)
    agent.connect(name)
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        number += 1
        for request, consumer, most in (
            ("r", f"{number:060000}", 1 << 30),
            ("r", f"{number:0128}", 1024),
            (f"{number:0128}", f"{number:0128}", 1024),
            (f"{number:030000}", "c", 1),
        ):
            told = Released(request_id=request, consumer=consumer, num_consumers=most)
            agent.notify(name, wire.encode(told))


def _block_questions(victim: Victim) -> None:
    """Beside many requests that begin at once, whose blocks are to be put on offer."""
    assert isinstance(victim, StepVictim)
    victim.honest(b"none")
    names = b"".join(chain(b"63", [63] * 4000, BLOCK))
    _pour(victim, _message(wire.encode(wire.FindBlocks(hashes=names))) * 20, 8)


def _countless_cells(victim: Victim) -> None:
    """A peer's description by whose numbers a plan would be huge."""
    assert isinstance(victim, StepVictim)
    for _ in range(20):
        victim.honest(description("p", layout=layout_of(1 << 15)))


def _doorbell(victim: Victim) -> None:
    """Another user of the host: finds it, closes it, fills it."""
    assert isinstance(victim, SideVictim)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    end = time.monotonic() + SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as attacker:
        names = [victim.wakeup]
        for line in open("/proc/net/unix").read().splitlines():  # noqa: SIM115
            names += [line.split()[-1].replace("@", "\0")] if "commext" in line else []
        number = 0
        while time.monotonic() < end:
            number += 1
            for name in names:
                for said in (b"close", b"", str(number).encode()):
                    with contextlib.suppress(OSError):
                        attacker.sendto(said, name)


_ENVELOPES = b"\x01\x010" + _PART * 100 + _message(_DESCRIBE)
_UNFINISHED = bytes([2]) + struct.pack(">Q", wire.MAX_REQUEST_BYTES) + b"x" * 4000
_UNREAD = {"data": _message(_DESCRIBE) * 20, "number": 300, "reads": False}
_OPEN_ONLY: dict[str, Callable[[Victim], None]] = {
    **{"held_questions": _held_questions, "replaced_questions": _replaced_questions},
    "unread_answers": partial(_pour, **_UNREAD),
}
_BOTH: dict[str, Callable[[Victim], None]] = {
    "unfinished_messages": partial(_pour, data=_PART * 50, number=8),
    "envelopes": partial(_pour, data=_ENVELOPES, number=8),
    "many_small_frames": partial(_pour, data=_message(b"\xc0") * 500, number=100),
    "unfinished_frames": partial(_kept, data=_UNFINISHED),
    **{"silence": partial(_kept, data=b""), "reconnects": _reconnects},
}
_attack = partial(Attack, max_growth_mib=MAX_GROWTH_MIB)
_secret, _steps = partial(side_channel, secret=SECRET), partial(side_channel, kind=StepVictim)
ATTACKS = (
    *(_attack(name, side_channel, one) for name, one in (_BOTH | _OPEN_ONLY).items()),
    # docs/ports_and_security.md: it succeeds, and costs as much.
    Attack("notifications", side_channel, _notifications, 15.0, 1333.0, max_wait_seconds=1.1),
    Attack("doorbell", side_channel, _doorbell),
    *(Attack(one.__name__[1:], _steps, one) for one in (_block_questions, _countless_cells)),
    *(_attack(f"{name}_secret", _secret, one) for name, one in _BOTH.items()),
)
