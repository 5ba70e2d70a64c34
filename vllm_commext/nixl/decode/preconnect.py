"""Prefill engines that configuration names are asked who they are before any request is.

An entry is a side channel's host and port.  The engine's id and size, and what its requests call
that address, come with the answer; its workers are then connected to as for a request, so that the
first one finds them ready.  An engine that starts later is asked again and again, in growing
intervals, for some ten minutes.
"""

import random
import time
from dataclasses import dataclass
from typing import Protocol

from vllm_commext.errors import CommextTimeoutError
from vllm_commext.nixl.config import ConnectorConfig, parse_address
from vllm_commext.nixl.decode.peer_states import BackOff
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.inquiry import Inquiry

BACK_OFF = BackOff(first_seconds=0.5, most_seconds=10.0)
MAX_FAILURES = 80
"""With the intervals of ``BACK_OFF`` some ten minutes: a large model takes as long to load."""


class Asker(Protocol):
    """Who can ask, as far as is needed here."""

    def ask(self, host: str, port: int) -> Inquiry:
        """Ask whichever engine serves there for the description of its first worker."""
        ...


@dataclass(frozen=True)
class Discovered:
    """A prefill engine that has answered; ``host`` and ``port`` as its requests will name them."""

    engine_id: str
    incarnation: str
    host: str
    port: int
    tp_size: int
    pp_size: int


@dataclass
class _Entry:
    """One side channel; times in seconds of ``time.monotonic``."""

    host: str
    port: int
    inquiry: Inquiry | None = None
    asked: float = 0.0
    num_failures: int = 0
    retry_at: float = 0.0


class Preconnect:
    """Side channels that have not answered yet.  Owned by one thread.

    Args:
        asker: who asks.
        config: names the side channels.
    """

    def __init__(self, asker: Asker, config: ConnectorConfig) -> None:
        self._asker = asker
        self._limit_seconds = config.handshake_timeout
        addresses = [parse_address(text) for text in dict.fromkeys(config.peers)]
        self._entries = [_Entry(*address) for address in addresses if address is not None]

    def __len__(self) -> int:
        """Side channels that are still to be asked, or asked again."""
        return len(self._entries)

    @property
    def num_pending(self) -> int:
        """Questions under way."""
        return sum(entry.inquiry is not None for entry in self._entries)

    def poll(self) -> list[Discovered]:
        """Engines that have answered since the last call; each does once."""
        found: list[Discovered] = []
        for entry in list(self._entries):
            try:
                discovered = self._look(entry, time.monotonic())
            except Exception as error:  # noqa: BLE001 one engine's error is no other's
                self._fail(entry, error)
            else:
                if discovered is not None:
                    self._forget(entry)
                    found.append(discovered)
        return found

    def close(self) -> None:
        """Ask nobody any more."""
        for entry in list(self._entries):
            self._forget(entry)

    def _look(self, entry: _Entry, now: float) -> Discovered | None:
        if entry.inquiry is None:
            if now >= entry.retry_at:
                entry.asked = now
                entry.inquiry = self._asker.ask(entry.host, entry.port)
            return None
        reply = entry.inquiry.poll()
        if reply is not None:
            reply = wire.as_description(reply)
            described = wire.open_description(reply)
            host, port = reply.host or entry.host, reply.port or entry.port
            size = described.layout.tp_size, described.layout.pp_size
            return Discovered(described.engine_id, reply.incarnation, host, port, *size)
        if now - entry.asked >= self._limit_seconds:
            raise CommextTimeoutError(f"no answer within {self._limit_seconds:g} s")
        return None

    def _fail(self, entry: _Entry, error: Exception) -> None:
        """Try again later, or no more."""
        if entry.inquiry is not None:
            entry.inquiry.close()
            entry.inquiry = None
        entry.num_failures += 1
        entry.retry_at = time.monotonic() + BACK_OFF.seconds(entry.num_failures, random.random())
        name = f"{entry.host}:{entry.port}"
        if entry.num_failures >= MAX_FAILURES:
            logger.warning(
                "peers: %s has not answered %d times and is asked no more; its first request "
                "connects to it: %s",
                name,
                entry.num_failures,
                error,
            )
            self._forget(entry)
        elif entry.num_failures == 1:
            logger.info("peers: %s does not answer yet and is asked again: %s", name, error)

    def _forget(self, entry: _Entry) -> None:
        if entry.inquiry is not None:
            entry.inquiry.close()
        self._entries.remove(entry)
