"""The answering half of the side channel, in a thread of the EngineCore process.

Nothing that arrives can end the thread: what is not a valid request is counted and refused.
"""

import ipaddress
import math
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.prefill.listener import Connection, Listener
from vllm_commext.nixl.reuse import OfferTable
from vllm_commext.nixl.stream.producer import StreamDirectory
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import addresses
from vllm_commext.nixl.wire.description import describe, open_description
from vllm_commext.nixl.wire.seal import FrameVerifier

_RETRY_SECONDS = 0.2
DRAIN_LOOK_SECONDS = 0.5
MAX_HELD = 1024
"""Questions that wait for something to be known, one a connection; more are answered at once."""
MAX_HELD_OF_ONE = 256  # the same of one address
MAX_HELD_KEYS = 1 << 13  # keys in all of them
_LATE_SECONDS = 0.01  # between two looks for questions that have waited long enough


class _Question(NamedTuple):
    asked: wire.FindStreams
    nonce: bytes
    until: float

    @property
    def keys(self) -> list[str]:
        return [*self.asked.keys, *self.asked.awaited]


def resolve(host: str, port: int) -> str:
    """Numeric address of a host, for binding; an IPv4 one where there is, as askers take it; raises
    ConfigError."""
    try:
        address = str(addresses(host, port)[0][1][0])
    except OSError as error:
        raise ConfigError(
            f"side_channel_host {host!r} has no address ({error}): set VLLM_NIXL_SIDE_CHANNEL_HOST "
            "to an address of this machine that decode engines reach"
        ) from error
    number = ipaddress.ip_address(address.partition("%")[0])
    if (getattr(number, "ipv4_mapped", None) or number).is_unspecified:
        raise ConfigError(
            f"side_channel_host {host!r} stands for all addresses of this machine, and decode "
            "engines are told to connect to it: expected one address or name of this machine that "
            "they reach; set VLLM_NIXL_SIDE_CHANNEL_HOST or side_channel_host to it"
        )
    return address


class SideChannelServer:
    """Serves the descriptions of one engine's workers until it is closed.

    Args:
        drains: asked from this server's thread; None where the engine never drains.

    Raises:
        ConfigError: the host has no address or the port cannot be bound.
    """

    def __init__(
        self,
        engine_id: str,
        incarnation: str,
        host: str,
        port: int,
        descriptions: Mapping[int, bytes],
        secret: bytes | None = None,
        drains: Callable[[], bool] | None = None,
        streams: StreamDirectory | None = None,
        blocks: OfferTable | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._place: dict[str, Any] = {
            "engine_id": engine_id,
            "incarnation": incarnation,
            "host": host,
            "port": port,
        }
        self._streams = streams
        self._blocks = blocks
        self._max_bytes = wire.MAX_REQUEST_BYTES if blocks is None else wire.MAX_QUESTION_BYTES
        self._num_refused = self._num_taken = 0
        self._verifier = FrameVerifier(secret)
        self._drains = drains
        self._told = False
        # By connection; who has asked for a key; how many each address has, and keys of all; keys
        # of which something new is known.
        self._held: dict[Connection, _Question] = {}
        self._waiting: dict[str, dict[Connection, None]] = {}
        self._num_held = Counter[str]()
        self._num_keys = 0
        self._changed: deque[str] = deque()
        self._next_late = math.inf
        self._asking: set[Connection] = set()
        described = {
            number: describe(body, incarnation, host, port) for number, body in descriptions.items()
        }
        self._answers = {number: wire.encode(answer) for number, answer in described.items()}
        opened = [open_description(answer) for answer in described.values()]
        self._pp_size = max((one.layout.pp_size for one in opened), default=1)
        self._log = RateLimitedLog()
        self._stop = threading.Event()
        self._listener = Listener(
            _bind(resolve(host, port), host, port), self._max_bytes, self._reply, self._forget
        )
        if streams is not None:
            streams.on_change = self._note_change
        self._thread = threading.Thread(
            target=self._serve, name="commext-side-channel", daemon=True
        )
        self._thread.start()

    @property
    def num_refused(self) -> int:
        return self._num_refused + self._listener.num_refused

    def take_refused(self) -> int:
        new, self._num_taken = self.num_refused - self._num_taken, self.num_refused
        return new

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._listener.wake()
        self._thread.join(timeout=1.0)

    def _note_change(self, key: str) -> None:
        if key in self._waiting:
            self._changed.append(key)
            self._listener.wake()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                look = math.inf if self._drains is None else DRAIN_LOOK_SECONDS
                self._listener.turn(max(min(look, self._next_late - time.monotonic()), 0.0))
                self._answer_held()
                self._tell_drain()
            except Exception:  # noqa: BLE001 one asker's error is no other's
                self._log.exception("turn", "a turn of the side channel failed; it goes on")
                self._stop.wait(_RETRY_SECONDS)
        self._listener.close()

    def _answer_held(self) -> None:
        while self._changed:
            for connection in [*self._waiting.get(self._changed.popleft(), ())]:
                self._answer_question(connection)
        now = time.monotonic()
        if now >= self._next_late:
            for connection in [one for one, asked in self._held.items() if asked.until <= now]:
                self._answer_question(connection)
            untils = [question.until for question in self._held.values()]
            self._next_late = max(min(untils, default=math.inf), now + _LATE_SECONDS)

    def _answer_question(self, connection: Connection) -> None:
        question = self._held[connection]
        if (found := self._found(question)) is not None:
            self._forget_question(connection, question)
            self._send_found(connection, found, question.nonce)

    def _found(self, question: _Question) -> wire.FoundStreams | None:
        asked, is_late = question.asked, time.monotonic() >= question.until
        assert self._streams is not None  # else no such question is held
        found = self._streams.find(asked.keys, asked.awaited)
        if not found and not is_late:
            return None
        tp_size = len(self._answers) // self._pp_size
        return wire.FoundStreams(**self._place, tp_size=tp_size, pp_size=self._pp_size, found=found)

    def _send_found(
        self, connection: Connection, found: wire.FoundStreams | wire.FoundBlocks, nonce: bytes
    ) -> None:
        frame = wire.encode(found)
        self._listener.send(connection, self._verifier.prove(frame, nonce, time.time()))

    def _forget(self, connection: Connection) -> None:
        self._asking.discard(connection)
        if (question := self._held.get(connection)) is not None:
            self._forget_question(connection, question)

    def _keep_question(self, connection: Connection, question: _Question) -> None:
        self._held[connection] = question
        self._num_held[connection.address] += 1
        self._num_keys += len(question.keys)
        for key in question.keys:
            self._waiting.setdefault(key, {})[connection] = None

    def _forget_question(self, connection: Connection, question: _Question) -> None:
        del self._held[connection]
        self._num_held[connection.address] -= 1
        if not self._num_held[connection.address]:
            del self._num_held[connection.address]
        self._num_keys -= len(question.keys)
        for key in dict.fromkeys(question.keys):
            del self._waiting[key][connection]
            if not self._waiting[key]:
                del self._waiting[key]

    def _reply(self, connection: Connection, frame: bytes) -> None:
        now = time.time()
        try:
            body, nonce = self._verifier.admit(frame, now, connection.address)
            request = wire.decode_request(body, self._max_bytes)
            connection.is_admitted = True
            if isinstance(request, wire.FindStreams):
                self._check_streams(request)
                self._hold(request, connection, nonce)
            elif isinstance(request, wire.FindBlocks):
                self._send_found(connection, self._find_blocks(request), nonce)
            else:
                self._describe(connection, self._worker_asked_for(request), nonce, now)
        except ProtocolError as error:
            self._num_refused += 1
            self._log.warning("refused", f"side channel: refused a frame: {error}")
            self._listener.send(connection, wire.encode(wire.Refused(reason=str(error))))

    def _describe(self, connection: Connection, worker: int, nonce: bytes, now: float) -> None:
        described = self._answers[worker]
        answer = self._verifier.prove(described, nonce, now)
        connection.nonce = nonce
        self._asking.add(connection)
        self._listener.send(connection, answer, is_shared=answer is described)
        if self._told:
            self._send_draining(connection)

    def _tell_drain(self) -> None:
        if self._drains is None or self._drains() == self._told:
            return
        self._told = not self._told
        what = "drains: it takes no new requests" if self._told else "takes requests again"
        logger.info("prefill engine %s %s; its peers are told", self.engine_id, what)
        for connection in [*self._asking]:
            self._send_draining(connection)

    def _send_draining(self, connection: Connection) -> None:
        assert connection.nonce is not None  # it has asked
        frame = wire.encode(wire.Draining(drains=self._told))
        self._listener.send(connection, self._verifier.prove(frame, connection.nonce, time.time()))

    def _check_streams(self, asked: wire.FindStreams) -> None:
        """Raise ProtocolError for a question that cannot be answered here."""
        if self._streams is None:
            raise ProtocolError(
                f"engine {self.engine_id!r} streams no chunks: set stream_chunks in its "
                "kv_connector_extra_config"
            )
        keys = [*asked.keys, *asked.awaited]
        if len(keys) > wire.MAX_KEYS or any(len(key) > wire.KEY_DIGITS for key in keys):
            raise ProtocolError(
                f"expected at most {wire.MAX_KEYS} keys of {wire.KEY_DIGITS} digits, got "
                f"{len(keys)}"
            )

    def _hold(self, asked: wire.FindStreams, connection: Connection, nonce: bytes) -> None:
        wait = asked.wait_seconds if 0.0 < asked.wait_seconds <= wire.MAX_WAIT_SECONDS else 0.0
        question = _Question(asked, nonce, time.monotonic() + wait)
        if (before := self._held.get(connection)) is not None:
            self._forget_question(connection, before)
        if not wait or not self._has_room(connection, len(question.keys)):
            found = self._found(question._replace(until=0.0))
            assert found is not None  # as it may not wait
            self._send_found(connection, found, nonce)
            return
        self._keep_question(connection, question)
        # Only now, so that nothing is missed that becomes known meanwhile.
        self._answer_question(connection)
        if connection in self._held:
            self._next_late = min(self._next_late, question.until)

    def _has_room(self, connection: Connection, num_keys: int) -> bool:
        is_full = len(self._held) >= MAX_HELD or self._num_keys + num_keys > MAX_HELD_KEYS
        return not is_full and self._num_held[connection.address] < MAX_HELD_OF_ONE

    def _find_blocks(self, request: wire.FindBlocks) -> wire.FoundBlocks:
        """Raises ProtocolError for a question that cannot be answered here."""
        if self._blocks is None:
            raise ProtocolError(
                f"engine {self.engine_id!r} offers no blocks for reuse: set reuse_blocks in its "
                "kv_connector_extra_config, and see what its log says of it"
            )
        num_hashes, rest = divmod(len(request.hashes), wire.HASH_BYTES)
        if rest or num_hashes > wire.MAX_HASHES:
            raise ProtocolError(
                f"expected at most {wire.MAX_HASHES} hashes of {wire.HASH_BYTES} bytes, got "
                f"{len(request.hashes)} bytes"
            )
        begins = range(0, len(request.hashes), wire.HASH_BYTES)
        run = self._blocks.find(request.hashes[one : one + wire.HASH_BYTES] for one in begins)
        return wire.FoundBlocks(
            **self._place,
            tp_size=len(self._answers),
            block_ids=run.block_ids,
            generations=run.generations,
        )

    def _worker_asked_for(self, request: wire.DescribeRequest) -> int:
        if request.engine_id not in ("", self.engine_id):
            raise ProtocolError(
                f"this is engine {self.engine_id!r}, the request is for engine "
                f"{request.engine_id!r}: was it restarted under another id, or is the port wrong?"
            )
        if request.tp_rank not in self._answers:
            raise ProtocolError(
                f"engine {self.engine_id!r} has the workers {sorted(self._answers)}, the request "
                f"is for worker {request.tp_rank}"
            )
        return request.tp_rank


def _bind(address: str, host: str, port: int) -> socket.socket:
    """A socket bound to an address that stands for a host; raises ConfigError."""
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"side channel: {host}:{port} cannot be bound ({error}): another process uses the "
            "port or the address is not of this machine; set VLLM_NIXL_SIDE_CHANNEL_PORT or "
            "VLLM_NIXL_SIDE_CHANNEL_HOST"
        ) from error
    return bound
