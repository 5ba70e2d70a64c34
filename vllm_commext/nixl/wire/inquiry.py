"""The asking half of the side channel: questions to one engine."""

from __future__ import annotations

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import SideChannelSocket, endpoint
from vllm_commext.nixl.wire.seal import FrameSigner

Request = wire.AnyRequest
Reply = wire.AnyReply


class Inquiry:
    """A decode engine's question to one prefill engine; never blocks.

    Its connection may be kept open after the answer: it closes with the prefill engine's process.

    Args:
        host: the prefill engine's side-channel host.
        port: its port.
        request: what to ask.
        secret: the prefill engine's secret, see ``seal``; None where it has none.

    Raises:
        ProtocolError: that is not an address to ask, or no socket is left.
    """

    def __init__(self, host: str, port: int, request: Request, secret: bytes | None = None) -> None:
        self.address = endpoint(host, port)
        self._signer = FrameSigner(secret)
        try:
            self.socket = SideChannelSocket(host, port, wire.MAX_REPLY_BYTES)
        except ProtocolError as error:
            raise ProtocolError(f"{self.address!r} is not an address to ask: {error}") from error
        except OSError as error:
            raise ProtocolError(f"no socket is left to ask {self.address!r}: {error}") from error
        self.ask(request)

    def ask(self, request: Request) -> None:
        """Ask one more question over the same connection.  The one before is answered, or its
        answer is told apart by who reads it."""
        self.socket.send(self._signer.prove(wire.encode(request)))

    def poll(self) -> Reply | None:
        """The answer, or None where there is none yet.

        Raises:
            ProtocolError: the prefill engine cannot be reached or refused, or the answer is not
                valid.
            OtherAnswerError: it is proven, and that to a question before the last one.
        """
        frame = self.socket.receive()
        if frame is None:
            if not self.socket.error:
                return None
            raise ProtocolError(
                f"nothing takes connections at the prefill engine's side channel {self.address}, "
                f"or it has closed the connection ({self.socket.error}): is the engine up, and "
                "does this host reach the address, which VLLM_NIXL_SIDE_CHANNEL_HOST names on the "
                "prefill host?"
            )
        reply = wire.decode_reply(self._signer.check(frame))
        if isinstance(reply, wire.Refused):
            raise ProtocolError(f"the prefill engine refused the handshake: {reply.reason[:1000]}")
        return reply

    def take_news(self) -> wire.Draining | None:
        """What the engine has said since its answer, the oldest first; None where there is nothing.

        Raises:
            ProtocolError: it is not valid.
        """
        frame = self.socket.receive()
        return None if frame is None else wire.decode_news(self._signer.check(frame))

    def is_connected(self) -> bool:
        """False once the connection was refused or has closed."""
        return self.socket.is_connected()

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        self.socket.close()
