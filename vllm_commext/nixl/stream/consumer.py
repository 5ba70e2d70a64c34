"""The decode engine's scheduler side of chunk streaming: requests that wait, without any blocks,
for their prefill engines to begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.stream.asker import Answer, StreamAsker
from vllm_commext.nixl.stream.streaming import Streaming
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.params import TransferParams, key_of, params_of
from vllm_commext.nixl.wire.places import place_of_stream

if TYPE_CHECKING:
    from vllm.v1.request import Request


class StreamConsumer:
    """Requests whose prompts are to be read while they are computed.

    Args:
        asker: asks the prefill engines; None where chunk streaming cannot be done here.
        refusal: why it cannot.
        secret: what proves the places to ask, None where the side channel has no secret.
    """

    def __init__(
        self, asker: StreamAsker | None, refusal: str = "", secret: bytes | None = None
    ) -> None:
        self._asker = asker
        self._secret = secret
        self._refusal = refusal
        self._waiting: set[str] = set()
        self._failed: dict[str, ProtocolError] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has no answer yet, as far as ``take`` knows."""
        return request_id in self._waiting

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request waits for an answer that has not come; with one it can still wait for
        something else, such as its grammar."""
        return request_id in self._waiting and self._answer(request_id) is None

    def has_answer(self, request: Request) -> bool:
        """Whether ``take`` gives one."""
        return self._answer(request.request_id) is not None

    def watch(self, request: Request, *, awaits_token: bool) -> None:
        """Ask for a request's key until ``take`` gives the answer, and then, where it *awaits* it,
        for the first token after its prompt, until ``forget``."""
        request_id, params = request.request_id, params_of(request) or {}
        self._waiting.add(request_id)
        if self._asker is None:
            text = f"the request is to be read while it is computed, which {self._refusal}"
            self._failed[request_id] = ProtocolError(text)
            return
        try:
            key, place = key_of(params), place_of_stream(params, self._secret)
            self._asker.watch(request_id, key, place, awaits_token=awaits_token)
        except ProtocolError as error:
            self._failed[request_id] = error

    def take(self, request_id: str) -> TransferParams | ProtocolError | None:
        """Where a request's prompt is read, or why it cannot be; None while nothing is known."""
        answer = self._answer(request_id)
        if answer is None:
            return None
        self._waiting.discard(request_id)
        self._failed.pop(request_id, None)
        if self._asker is not None:
            self._asker.settle(request_id)
        if isinstance(answer, CommextError) and not isinstance(answer, ProtocolError):
            return ProtocolError(str(answer))
        return answer

    def _answer(self, request_id: str) -> Answer | None:
        answer = self._failed.get(request_id)
        if answer is None and self._asker is not None:
            return self._asker.answer(request_id)
        return answer

    def wait_for_token(self, request_id: str, seconds: float) -> None:
        """Wait until the first token after a request's prompt has come, or none comes, for at most
        so long."""
        if self._asker is not None:
            self._asker.wait_for_token(request_id, seconds)

    def take_tokens(self) -> dict[str, tuple[int, str]]:
        """First tokens that have come since the last call, and what each was drawn by."""
        return {} if self._asker is None else self._asker.take_tokens()

    def forget(self, request_id: str) -> None:
        """The request has ended, or its first token is not awaited any more."""
        self._waiting.discard(request_id)
        self._failed.pop(request_id, None)
        if self._asker is not None:
            self._asker.forget(request_id)


def consumer_of(
    streaming: Streaming,
    engine_id: str,
    client: ClientThread,
    config: ConnectorConfig,
    notify: Callable[[], None],
) -> StreamConsumer:
    """What an engine does with requests whose prompts are to be read while they are computed.

    Args:
        streaming: what it does of chunk streaming.
        engine_id: its id.
        client: asks prefill engines.
        config: the connector's settings.
        notify: called when something has become known.
    """
    if streaming.refusal:
        return StreamConsumer(None, streaming.refusal.meaning)
    limits = config.stream_begin_timeout, config.handshake_timeout
    return StreamConsumer(StreamAsker(client, engine_id, *limits, notify), secret=client.secret)
