"""A shared secret for the side channel: each frame is proven by HMAC-SHA256, and a request once; so
are request parameters, which the fence keeps from being used twice.

A request says which process asks and the number of the request there, which grows; the answering
side remembers the numbers of each. Clocks count only for what may be of before it began to.

The secret proves who asks and who answers; it hides nothing of what they say. Nothing here logs it,
and no message of an error holds any part of it."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import os
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.wire import messages as wire

SECRET_VARIABLE = "COMMEXT_NIXL_SECRET"
"""Not called ``VLLM_...``: vLLM hands such variables on to other processes and writes them into its
logs and caches."""
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
WINDOW_SECONDS = 60.0  # how far the clocks of two hosts may be apart, the way between them included
MAX_ASKERS = 1 << 16  # whose numbers a verifier remembers; an asker is a process that asks
MAX_NEW_ASKERS = 1 << 12  # from one address within twice the window
NONCE_BYTES = 16
_ASKER_BYTES = 8
REORDERED = 1024
"""How far the requests of one asker may overtake each other, over all of its connections."""
REQUEST = b"commext-nixl request"
REPLY = b"commext-nixl reply"
PARAMETERS = b"commext-nixl parameters"


class Sealed(wire.Frame, tag="sealed", frozen=True):
    """A frame with its proof.

    Attributes:
        sent: when it was sealed, in seconds since 1970 of the sender's clock.
        proof: HMAC-SHA256 of the purpose, ``sent``, ``nonce`` and ``body``.
    """

    sent: float
    nonce: bytes
    body: bytes
    proof: bytes


_SEALED = msgspec.msgpack.Decoder(Sealed)
# Routers need not keep the order of names.
_CANONICAL = msgspec.msgpack.Encoder(order="sorted")


def read_secret(path: str, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret from a file, or from ``SECRET_VARIABLE`` where no file is named; None without
    either. White space around it does not count; raises ConfigError."""
    source = f"side_channel_secret_file {path!r}" if path else SECRET_VARIABLE
    if path:
        try:
            with Path(path).open("rb") as file:
                secret = file.read(MAX_SECRET_BYTES + 2).strip()
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    elif SECRET_VARIABLE in environ:
        secret = environ[SECRET_VARIABLE].encode().strip()
    else:
        return None
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{source}: expected a secret of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, got "
            f"{len(secret)}: `openssl rand -hex 32` makes a good one"
        )
    return secret


def seal(secret: bytes, purpose: bytes, frame: bytes, nonce: bytes, now: float) -> bytes:
    proof = _proof(secret, purpose, now, nonce, frame)
    return wire.encode(Sealed(sent=now, nonce=nonce, body=frame, proof=proof))


def unseal(secret: bytes, purpose: bytes, frame: bytes) -> Sealed:
    """Check a proof; raises ProtocolError where it is none of this secret and purpose."""
    sealed = open_envelope(frame)
    if sealed is None:
        raise ProtocolError("the frame carries no proof of the side channel's secret")
    expected = _proof(secret, purpose, sealed.sent, sealed.nonce, sealed.body)
    if not hmac.compare_digest(expected, sealed.proof):
        raise ProtocolError(
            "the frame was sealed with another secret, or altered: give both engines the same "
            "side_channel_secret_file"
        )
    return sealed


def open_envelope(frame: bytes) -> Sealed | None:
    """A sealed frame, its proof not yet checked; None where it is a frame of another kind."""
    try:
        return _SEALED.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _proof(secret: bytes, purpose: bytes, sent: float, nonce: bytes, body: bytes) -> bytes:
    head = struct.pack("<dII", sent, len(purpose), len(nonce))
    return hmac.new(secret, head + purpose + nonce + body, hashlib.sha256).digest()


def prove_params(secret: bytes, content: Any) -> str:
    """The proof of request parameters, hexadecimal; raises ProtocolError without an encoding."""
    try:
        encoded = _CANONICAL.encode(content)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"kv_transfer_params were altered: {error}") from error
    return hmac.new(secret, PARAMETERS + encoded, hashlib.sha256).hexdigest()


def check_params(secret: bytes, content: Any, proof: str) -> None:
    if not proof:
        raise ProtocolError(
            "this decode engine has a side-channel secret, and kv_transfer_params carry no proof "
            f"of it: set side_channel_secret_file (or {SECRET_VARIABLE}) on the prefill engine "
            "too, install the same vllm-commext there, and let the router pass remote_seal on"
        )
    if not is_proof(proof, prove_params(secret, content)):
        raise ProtocolError(
            "kv_transfer_params were sealed with another secret, or altered: give both engines "
            "the same side_channel_secret_file, and let the router pass all parameters on unchanged"
        )


def is_proof(proof: Any, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(
        expected.encode(), proof.encode(errors="replace")
    )


class _Askers:
    """Numbers of requests that were answered, by asker: none is answered twice, whatever the clocks
    do.  What it keeps is bounded, and an asker that is not forgotten can ask as often as it likes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = time.time() - clock()
        self._surely_later = time.time() + WINDOW_SECONDS
        # By asker, least recently heard of first: the first number that was surely sent since the
        # start, the highest one, one bit for each of those below it that was seen, the latest time
        # of sending, and when it was heard of.
        self._known: OrderedDict[bytes, tuple[float, int, int, float, float]] = OrderedDict()
        self._new: dict[str, tuple[float, int]] = {}
        self._forgotten = -math.inf

    def note(self, sealed: Sealed, wall: float, address: str) -> None:
        """Remember a request; raises ProtocolError where it is a repetition, or may be one."""
        if len(sealed.nonce) != NONCE_BYTES:
            raise ProtocolError(f"expected a nonce of {NONCE_BYTES} bytes, got {len(sealed.nonce)}")
        asker = sealed.nonce[:_ASKER_BYTES]
        number = int.from_bytes(sealed.nonce[_ASKER_BYTES:], "big")
        known = self._known.get(asker)
        first, highest, seen, latest, _ = known or (math.inf, number, 0, sealed.sent, 0.0)
        highest, seen = _with_number(highest, seen, number)
        if number < first:
            self._check_time(sealed.sent, wall)
        if known is None:
            self._meet(address)
        if sealed.sent > self._surely_later:
            first = min(first, number)
        self._known[asker] = first, highest, seen, max(latest, sealed.sent), self._clock()
        self._known.move_to_end(asker)

    def _check_time(self, sent: float, wall: float) -> None:
        """Check what is perhaps of before the start, or of a forgotten asker: its clock is all that
        there is to go by."""
        begun = self._begun + self._clock()
        if not any(abs(one - sent) <= WINDOW_SECONDS for one in (wall, begun)):
            raise ProtocolError(
                f"the request was sealed {wall - sent:.0f} s ago by the clocks of both hosts, "
                f"expected at most {WINDOW_SECONDS:g} s either way: set the clocks (NTP)"
            )
        if sent <= self._forgotten:
            raise ProtocolError("perhaps a replayed request: retry with another asker, later")

    def _meet(self, address: str) -> None:
        """Make room for an asker that is not known."""
        now = self._clock()
        begun, num_new = self._new.get(address, (now, 0))
        if now - begun > 2 * WINDOW_SECONDS:
            begun, num_new = now, 0
        if num_new >= MAX_NEW_ASKERS:
            raise ProtocolError(
                f"more than {MAX_NEW_ASKERS} new askers from one address within two minutes: "
                "retry later"
            )
        if len(self._known) >= MAX_ASKERS:
            self._forget(now)
        self._new[address] = begun, num_new + 1
        if len(self._new) > MAX_ASKERS:
            del self._new[next(iter(self._new))]

    def _forget(self, now: float) -> None:
        *_, latest, heard = next(iter(self._known.values()))
        if now - heard <= 2 * WINDOW_SECONDS:
            raise ProtocolError(f"more than {MAX_ASKERS} askers within two minutes: retry later")
        self._known.popitem(last=False)
        self._forgotten = max(self._forgotten, latest)


def _with_number(highest: int, seen: int, number: int) -> tuple[int, int]:
    """One more number; raises ProtocolError where it was seen, or is too old to tell."""
    if number > highest:
        ahead = min(number - highest, REORDERED)
        return number, (seen << ahead | 1) & ((1 << REORDERED) - 1)
    if highest - number >= REORDERED or seen >> (highest - number) & 1:
        raise ProtocolError("replayed request: it was answered before")
    return highest, seen | 1 << (highest - number)


class FrameVerifier:
    """The answering side: lets requests in, all without a secret, and proves the answers."""

    def __init__(self, secret: bytes | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._askers = _Askers(clock)

    def admit(self, frame: bytes, now: float, address: str = "") -> tuple[bytes, bytes]:
        """The request within a frame that came from an address *now*, in seconds since 1970, and
        the nonce that its answer has to carry; raises ProtocolError."""
        if self._secret is None:
            if open_envelope(frame) is not None:
                raise ProtocolError(
                    "the request is sealed with a secret, but this prefill engine has none: set "
                    f"side_channel_secret_file (or {SECRET_VARIABLE}) on both engines, or on none"
                )
            return frame, b""
        if open_envelope(frame) is None:
            wire.decode_request(frame)  # what is no request at all is told so
            raise ProtocolError(
                "this prefill engine has a side-channel secret, and the request carries no proof "
                f"of it: set side_channel_secret_file (or {SECRET_VARIABLE}) on the decode engine"
            )
        sealed = unseal(self._secret, REQUEST, frame)
        self._askers.note(sealed, now, address)
        return sealed.body, sealed.nonce

    def prove(self, reply: bytes, nonce: bytes, now: float) -> bytes:
        return reply if self._secret is None else seal(self._secret, REPLY, reply, nonce, now)


class OtherAnswerError(ProtocolError):
    """A proven answer to another request than the last one."""


class _Numbers:
    """Nonces of this process's requests: who asks, and a number that grows."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self._asker = secrets.token_bytes(_ASKER_BYTES)
        self._numbers = itertools.count(1)

    def take(self) -> bytes:
        return self._asker + next(self._numbers).to_bytes(NONCE_BYTES - _ASKER_BYTES, "big")


_NUMBERS = _Numbers()


class FrameSigner:
    """The asking side: proves requests and checks the answer to the last one."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._nonce = b""

    def prove(self, request: bytes) -> bytes:
        if self._secret is None:
            return request
        self._nonce = _NUMBERS.take()
        return seal(self._secret, REQUEST, request, self._nonce, time.time())

    def check(self, frame: bytes) -> bytes:
        """The answer within a frame.  A refusal need not be proven: it can come from an engine
        without the secret.

        Raises:
            ProtocolError: the answer is not proven.
            OtherAnswerError: it is not the one to this request.
        """
        if self._secret is None:
            return frame
        if open_envelope(frame) is None:
            if isinstance(wire.decode_reply(frame), wire.Refused):
                return frame
            raise ProtocolError(
                "the prefill engine's answer carries no proof of the side channel's secret: set "
                f"side_channel_secret_file (or {SECRET_VARIABLE}) on that engine too"
            )
        sealed = unseal(self._secret, REPLY, frame)
        if sealed.nonce != self._nonce:
            raise OtherAnswerError("the prefill engine's answer is that to another request")
        return sealed.body
