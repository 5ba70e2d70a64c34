"""The answering half of the side channel: decode workers ask a prefill engine for the description
of one of its workers, and decode engines where prompts are read while they are computed; any engine
asks another which blocks it has on offer.

It answers on a ZMQ ROUTER socket from a thread in its EngineCore process, and tells whoever has
asked when the engine begins to drain.  Nothing that arrives
there can end the thread: what is not a valid request is counted, answered with the reason, and
forgotten.
"""

import contextlib
import ipaddress
import math
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import zmq

from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.reuse.hashes import HASH_BYTES
from vllm_commext.nixl.reuse.table import OfferTable
from vllm_commext.nixl.stream.directory import StreamDirectory
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.compatibility import digest
from vllm_commext.nixl.wire.connection import bound_waits, endpoint
from vllm_commext.nixl.wire.seal import Gate

_RETRY_SECONDS = 0.2
DRAIN_LOOK_SECONDS = 0.5
MAX_TOLD = 4096
"""Askers that are told of a drain, those that asked last."""
MAX_HELD = 1024
"""Questions about streams that wait for something to be known; more are answered at once."""


class _Question(NamedTuple):
    """A question about streams that is not answered yet, and the nonce of its answer."""

    asked: wire.FindStreams
    nonce: bytes
    until: float


def resolve(host: str, port: int) -> str:
    """Numeric address of a host, for binding; an IPv4 one where there is, as ZMQ connects to a
    name by IPv4.

    Raises:
        ConfigError: the host has no address, or stands for all of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"side_channel_host {host!r} has no address ({error}): set VLLM_NIXL_SIDE_CHANNEL_HOST "
            "to an address of this machine that decode engines reach"
        ) from error
    chosen = next((entry for entry in found if entry[0] == socket.AF_INET), found[0])
    address = str(chosen[4][0])
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
        engine_id: the engine's id; a request for another one is refused.
        incarnation: differs at every start of the engine; goes out with each answer.
        host: address or name to bind to.
        port: port to bind to.
        descriptions: the encoded ``WorkerDescription`` of each worker, by its number.
        secret: what a request must prove to know, see ``seal``; None lets everybody ask.
        drains: whether the engine drains, asked from this server's thread; None where it never
            does.
        streams: what is known of prompts that are read while they are computed.
        blocks: blocks of finished requests that are on offer; None where none are.

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
        self._place = (incarnation, host, port)
        self._streams = streams
        self._blocks = blocks
        self._max_bytes = wire.MAX_REQUEST_BYTES if blocks is None else wire.MAX_QUESTION_BYTES
        self.num_refused = 0
        self._num_taken = 0
        self._gate = Gate(secret)
        self._drains = drains
        self._told = False
        # Who has asked, by envelope, with what its request had as nonce.
        self._askers: OrderedDict[tuple[bytes, ...], bytes] = OrderedDict()
        self._held: dict[tuple[bytes, ...], _Question] = {}
        described = {
            number: wire.describe(body, incarnation, host, port)
            for number, body in descriptions.items()
        }
        self._answers = {number: wire.encode(answer) for number, answer in described.items()}
        opened = [wire.open_description(answer) for answer in described.values()]
        self._configurations = {digest(one.facts) for one in opened}
        self._pp_size = max((one.layout.pp_size for one in opened), default=1)
        self._log = RateLimitedLog()
        self._stop = threading.Event()
        address = resolve(host, port)
        self._context = zmq.Context()
        self._socket = self._bind(address, host, port)
        self._bell, self._ear = self._bell_and_ear()
        self._bell_lock = threading.Lock()
        if streams is not None:
            streams.on_change = self._note_change
        self._thread = threading.Thread(
            target=self._serve, name="commext-side-channel", daemon=True
        )
        self._thread.start()

    def take_refused(self) -> int:
        """Frames refused since the last call; for one caller."""
        new, self._num_taken = self.num_refused - self._num_taken, self.num_refused
        return new

    def close(self) -> None:
        """Stop serving; returns within a second. Safe to repeat."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._ring()
        self._thread.join(timeout=1.0)
        self._context.destroy(linger=0)

    def _bind(self, address: str, host: str, port: int) -> zmq.Socket[bytes]:
        bound = self._context.socket(zmq.ROUTER)
        bound.setsockopt(zmq.LINGER, 0)
        bound.setsockopt(zmq.IPV6, int(":" in address))
        bound.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        bound.setsockopt(zmq.SNDTIMEO, 0)
        bound_waits(bound)
        try:
            bound.bind(endpoint(address, port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"side channel: {host}:{port} cannot be bound ({error}): another process uses the "
                "port or the address is not of this machine; set VLLM_NIXL_SIDE_CHANNEL_PORT or "
                "VLLM_NIXL_SIDE_CHANNEL_HOST"
            ) from error
        return bound

    def _bell_and_ear(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Two ends of a connection by which the thread is woken up."""
        bell, ear = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        ear.bind("inproc://bell")
        bell.connect("inproc://bell")
        return bell, ear

    def _ring(self) -> None:
        """A full socket has rings enough, and a closed one nobody to wake up."""
        with self._bell_lock, contextlib.suppress(zmq.ZMQError):
            self._bell.send(b"", zmq.NOBLOCK)

    def _note_change(self) -> None:
        """Something new is known of streams: answer who has asked for it."""
        if self._held:
            self._ring()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                poller.poll(self._look_ms())
                while self._ear.poll(0):
                    self._ear.recv()
                self._answer_held()
                self._tell_drain()
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if self._stop.is_set():
                    return
                self._log.warning("receive", f"side channel: receiving failed: {error}")
                self._stop.wait(_RETRY_SECONDS)
                continue
            self._reply(frames)

    def _look_ms(self) -> int | None:
        """Until there is something to do even if nothing arrives; None for never."""
        times = [question.until - time.monotonic() for question in self._held.values()]
        times += [] if self._drains is None else [DRAIN_LOOK_SECONDS]
        return max(math.ceil(min(times) * 1000), 0) if times else None

    def _answer_held(self) -> None:
        """Answer questions about streams of which something is known, or that have waited."""
        for envelope, (asked, nonce, until) in [*self._held.items()]:
            found = self._find(asked)
            if found.found or time.monotonic() >= until:
                del self._held[envelope]
                self._send(envelope, self._gate.prove(wire.encode(found), nonce, time.time()))

    def _reply(self, frames: list[bytes]) -> None:
        *envelope, frame = frames
        answer = self._answer(frame, tuple(envelope))
        if answer is None:
            self._answer_held()
            return
        self._send(envelope, answer)
        if self._told and tuple(envelope) in self._askers:
            self._send_draining(tuple(envelope))

    def _send(self, envelope: Sequence[bytes], answer: bytes) -> None:
        try:
            self._socket.send_multipart([*envelope, answer])
        except zmq.ZMQError as error:
            self._log.warning("send", f"side channel: a reply was not sent: {error}")

    def _tell_drain(self) -> None:
        """Tell whoever has asked where the engine drains, or does no more."""
        if self._drains is None or self._drains() == self._told:
            return
        self._told = not self._told
        what = "drains: it takes no new requests" if self._told else "takes requests again"
        logger.info("prefill engine %s %s; its peers are told", self.engine_id, what)
        for envelope in self._askers:
            self._send_draining(envelope)

    def _send_draining(self, envelope: tuple[bytes, ...]) -> None:
        frame = wire.encode(wire.Draining(drains=self._told))
        self._send(envelope, self._gate.prove(frame, self._askers[envelope], time.time()))

    def _answer(self, frame: bytes, envelope: tuple[bytes, ...]) -> bytes | None:
        """None where it is held."""
        now = time.time()
        try:
            body, nonce = self._gate.admit(frame, now)
            request = wire.decode_request(body, self._max_bytes)
            if isinstance(request, wire.FindStreams):
                self._hold(request, envelope, nonce)
                return None
            if isinstance(request, wire.FindBlocks):
                return self._gate.prove(wire.encode(self._find_blocks(request)), nonce, now)
            answer = self._gate.prove(self._answers[self._worker_asked_for(request)], nonce, now)
            self._askers[envelope] = nonce
            if len(self._askers) > MAX_TOLD:
                self._askers.popitem(last=False)
            return answer
        except ProtocolError as error:
            self.num_refused += 1
            self._log.warning("refused", f"side channel: refused a frame: {error}")
            return wire.encode(wire.Refused(reason=str(error)))

    def _hold(self, asked: wire.FindStreams, envelope: tuple[bytes, ...], nonce: bytes) -> None:
        """Keep a question about streams until something of it is known."""
        if self._streams is None:
            raise ProtocolError(
                f"engine {self.engine_id!r} streams no chunks: set stream_chunks in its "
                "kv_connector_extra_config"
            )
        num_keys = len(asked.keys) + len(asked.awaited)
        if num_keys > wire.MAX_KEYS:
            raise ProtocolError(f"expected at most {wire.MAX_KEYS} keys, got {num_keys}")
        waits = len(self._held) < MAX_HELD and 0.0 < asked.wait_seconds <= wire.MAX_WAIT_SECONDS
        until = time.monotonic() + (asked.wait_seconds if waits else 0.0)
        self._held[envelope] = _Question(asked, nonce, until)

    def _find(self, asked: wire.FindStreams) -> wire.FoundStreams:
        assert self._streams is not None  # else no question is held
        incarnation, host, port = self._place
        return wire.FoundStreams(
            engine_id=self.engine_id,
            incarnation=incarnation,
            host=host,
            port=port,
            tp_size=len(self._answers) // self._pp_size,
            pp_size=self._pp_size,
            found=self._streams.find(asked.keys, asked.awaited),
        )

    def _find_blocks(self, request: wire.FindBlocks) -> wire.FoundBlocks:
        if self._blocks is None:
            raise ProtocolError(
                f"engine {self.engine_id!r} offers no blocks for reuse: set reuse_blocks in its "
                "kv_connector_extra_config, and see what its log says of it"
            )
        num_hashes, rest = divmod(len(request.hashes), HASH_BYTES)
        if rest or num_hashes > wire.MAX_HASHES:
            raise ProtocolError(
                f"expected at most {wire.MAX_HASHES} hashes of {HASH_BYTES} bytes, got "
                f"{len(request.hashes)} bytes"
            )
        begins = range(0, len(request.hashes), HASH_BYTES)
        run = self._blocks.find(request.hashes[one : one + HASH_BYTES] for one in begins)
        incarnation, host, port = self._place
        return wire.FoundBlocks(
            question=request.question[:HASH_BYTES],
            engine_id=self.engine_id,
            incarnation=incarnation,
            host=host,
            port=port,
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
        if request.configuration and request.configuration not in self._configurations:
            self._log.warning(
                "configuration",
                f"decode engine {request.consumer!r} is configured differently from this prefill "
                f"engine {self.engine_id!r}; its log lists the differences",
            )
        return request.tp_rank
