"""The asking half of the side channel: questions to one engine."""

from __future__ import annotations

import zmq

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import ConnectionWatch, bound_waits, endpoint
from vllm_commext.nixl.wire.seal import Caller

Request = wire.AnyRequest
Reply = wire.AnyReply


class Inquiry:
    """A decode engine's question to one prefill engine; never blocks.

    Its connection may be kept open after the answer: it closes with the prefill engine's process.

    Args:
        context: ZMQ context of the asking thread.
        host: the prefill engine's side-channel host.
        port: its port.
        request: what to ask.
        secret: the prefill engine's secret, see ``seal``; None where it has none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        request: Request,
        secret: bytes | None = None,
    ) -> None:
        self.address = endpoint(host, port)
        self._secret = secret
        self._watch: ConnectionWatch | None = None
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ProtocolError(f"no socket is left to ask {self.address!r}: {error}") from error
        try:
            self._watch = ConnectionWatch(self._socket)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"no socket is left to ask {self.address!r}: {error}") from error
        bound_waits(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REPLY_BYTES)
        try:
            self._socket.connect(self.address)
            self.ask(request)
        except Exception as error:  # a request may name any host and engine
            self.close()
            raise ProtocolError(f"{self.address!r} is not an address to ask: {error}") from error

    def ask(self, request: Request) -> None:
        """Ask one more question over the same connection.  The one before is answered, or its
        answer is told apart by who reads it.

        Raises:
            zmq.ZMQError: it cannot be sent.
        """
        self._caller = Caller(self._secret)
        self._socket.send(self._caller.prove(wire.encode(request)), zmq.NOBLOCK)

    def poll(self) -> Reply | None:
        """The answer, or None where there is none yet.

        Raises:
            ProtocolError: the prefill engine cannot be reached or refused, or the answer is not
                valid.
            OtherAnswerError: it is proven, and that to a question before the last one.
        """
        try:
            frame = self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            if self.is_connected():
                return None
            raise ProtocolError(
                f"nothing takes connections at the prefill engine's side channel {self.address}, "
                "or it has closed the connection: is the engine up, and does this host reach the "
                "address, which VLLM_NIXL_SIDE_CHANNEL_HOST names on the prefill host?"
            ) from None
        reply = wire.decode_reply(self._caller.check(frame))
        if isinstance(reply, wire.Refused):
            raise ProtocolError(f"the prefill engine refused the handshake: {reply.reason}")
        return reply

    def take_news(self) -> wire.Draining | None:
        """What the engine has said since its answer, the oldest first; None where there is nothing.

        Raises:
            ProtocolError: it is not valid.
        """
        try:
            frame = self._socket.recv_multipart(zmq.NOBLOCK)[-1]
        except zmq.Again:
            return None
        return wire.decode_news(self._caller.check(frame))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What an answer arrives at."""
        return self._socket

    def is_connected(self) -> bool:
        """False once the connection was refused or has closed."""
        return self._watch is not None and not self._watch.has_failed()

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._socket.close(linger=0)
