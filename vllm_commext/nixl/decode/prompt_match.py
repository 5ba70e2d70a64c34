"""Which prompts that other engines have computed count here: those that are the request's own, and
none from before this engine had its weights and caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.geometry.plan import has_state, keeps_every_token
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.params import TransferParams
from vllm_commext.nixl.wire.prompt import OtherPromptError, check_prompt, digests, prompt_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_commext.nixl.geometry.layout import Group


class PromptMatch:
    """What of a request's prompt can be read where it is said to be.

    Args:
        sampler: what first tokens follow from beside requests.
    """

    def __init__(self, groups: Sequence[Group], sampler: Sampler) -> None:
        self._has_state = has_state(groups)
        self._leaves_last_token = not keeps_every_token(groups)
        self._sampler = sampler

    def check(self, request: Request, transfer_params: TransferParams) -> None:
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

    def most_tokens(self, request: Request) -> int:
        """Prompt tokens that a load may bring: the last one is computed here after a state or a
        window."""
        return request.num_prompt_tokens - (1 if self._leaves_last_token else 0)

    def num_tokens(self, request: Request, remote: RemoteRequest) -> int:
        """Prompt tokens that the load brings.

        Raises:
            ProtocolError: the state is that after more tokens than can be used.
        """
        most = self.most_tokens(request)
        if self._has_state and remote.num_tokens > most:
            raise ProtocolError(
                f"kv_transfer_params: expected the state after at most {most} of "
                f"{request.num_prompt_tokens} prompt tokens, got that after {remote.num_tokens}: "
                "was it prefilled by this connector, with the same prompt?"
            )
        return min(remote.num_tokens, most)


CLOCK_SECONDS = 1.0
"""How far the clocks of two engines' hosts may be apart: what another one has computed by then
after new weights here is not used."""


class Trust:
    """Since when what other engines compute counts, and whether they still keep it.

    Args:
        lease_seconds: how long prefill engines keep blocks of which they hear nothing.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._trusted_from = 0
        self._paused_since: float | None = None

    @property
    def is_paused(self) -> bool:
        return self._paused_since is not None

    def renounce(self) -> None:
        self._trusted_from = int(1000 * (time.time() + CLOCK_SECONDS))

    def admits(self, computed_at: int) -> bool:
        """Whether what was computed then, in milliseconds since 1970, counts."""
        return computed_at >= self._trusted_from

    def pause(self) -> None:
        self._paused_since = time.monotonic()

    def resume(self) -> bool:
        """The pause is over; whether other engines still keep what they kept before it."""
        since, self._paused_since = self._paused_since, None
        return since is None or time.monotonic() - since <= self._lease_seconds / 2
