"""The decode engine's scheduler side: what requests' parameters, or prefill engines that are asked,
say of where prompts are, compared with the prompts here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.geometry.request_blocks import has_state, keeps_every_token
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.stream.consumer import StreamConsumer
from vllm_commext.nixl.wire.params import TransferParams, params_of, read_params
from vllm_commext.nixl.wire.prompt import OtherPromptError, check_prompt, digests, prompt_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_commext.nixl.geometry.layout import Group


class ParamsCache:
    """What is known of requests that are to be loaded, until their loads are planned.

    Args:
        groups: the cache's groups.
        secret: what parameters are sealed with, None where there is none.
        sampler: what first tokens follow from beside requests.
        consumer: requests whose prompts are to be read while they are computed.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        secret: bytes | None,
        sampler: Sampler,
        consumer: StreamConsumer,
    ) -> None:
        self._has_state = has_state(groups)
        self._leaves_last_token = not keeps_every_token(groups)
        self._secret = secret
        self._sampler = sampler
        self._consumer = consumer
        self._known: dict[str, TransferParams | ProtocolError] = {}

    def of(self, request: Request) -> TransferParams:
        """What the request's parameters say, read and compared with its prompt once.

        Raises:
            ProtocolError: they cannot be used.
        """
        found = self._known.get(request.request_id)
        if found is None:
            try:
                found = self._read(request)
            except ProtocolError as error:
                found = error
            self._known[request.request_id] = found
        if isinstance(found, ProtocolError):
            raise found
        return found

    @property
    def known(self) -> set[str]:
        """Requests whose parameters were read, or of whose prompts a prefill engine has told."""
        return set(self._known)

    def remote(self, request: Request) -> RemoteRequest:
        """Where the request's blocks are.

        Raises:
            ProtocolError: its parameters cannot be used.
        """
        return self.of(request).remote

    def most_tokens(self, request: Request) -> int:
        """Prompt tokens that a load may bring: the last one is computed here after a state or a
        window."""
        return request.num_prompt_tokens - (1 if self._leaves_last_token else 0)

    def num_tokens(self, request: Request) -> int:
        """Prompt tokens that the load brings.

        Raises:
            ProtocolError: the parameters cannot be used, or the state is that after more tokens
                than can be used.
        """
        remote, most = self.remote(request), self.most_tokens(request)
        if self._has_state and remote.num_tokens > most:
            raise ProtocolError(
                f"kv_transfer_params: expected the state after at most {most} of "
                f"{request.num_prompt_tokens} prompt tokens, got that after {remote.num_tokens}: "
                "was it prefilled by this connector, with the same prompt?"
            )
        return min(remote.num_tokens, most)

    def waits(self, request: Request) -> bool:
        """Whether a request's prefill engine has not begun, as far as is known."""
        return request.request_id in self._consumer and not self._consumer.has_answer(request)

    def take_stream(self, request: Request) -> TransferParams | None:
        """What a prefill engine has said of a request that waited for it, from now on known here;
        None where it says that it cannot be read, or another prompt's."""
        answer = self._consumer.take(request.request_id)
        assert answer is not None  # asked for where ``waits`` says no
        if isinstance(answer, TransferParams):
            try:
                self._check(request, answer)
            except ProtocolError as error:
                answer = error
        self._known[request.request_id] = answer
        return answer if isinstance(answer, TransferParams) else None

    def forget(self, request_id: str) -> None:
        """The load is planned, or will never be."""
        self._known.pop(request_id, None)

    def _read(self, request: Request) -> TransferParams:
        params = params_of(request)
        assert params is not None  # only called where the parameters ask for a remote prefill
        transfer_params = read_params(params, self._secret)
        self._check(request, transfer_params)
        return transfer_params

    def _check(self, request: Request, transfer_params: TransferParams) -> None:
        """Refuse what is not this request's.

        Raises:
            OtherPromptError: it is another prompt's.
            ProtocolError: it is another model's.
        """
        remote, num_prompt = transfer_params.remote, request.num_prompt_tokens
        source = f"prefill engine {remote.engine_id!r} (request {remote.request_id!r} there)"
        if remote.num_tokens > num_prompt:
            raise OtherPromptError(
                f"kv_transfer_params are those of another prompt: {source} computed "
                f"{remote.num_tokens} tokens, and the prompt here has {num_prompt}. Does the "
                "router mix requests up, or do the engines tokenise differently?"
            )
        check_prompt(digests(prompt_of(request), remote.num_tokens), transfer_params.prompt, source)
        if transfer_params.first_token >= self._sampler.num_tokens > 0:
            raise ProtocolError(
                f"kv_transfer_params: expected remote_first_token below "
                f"{self._sampler.num_tokens}, the model's tokens, got "
                f"{transfer_params.first_token}: do {source} and this engine serve the same model?"
            )
