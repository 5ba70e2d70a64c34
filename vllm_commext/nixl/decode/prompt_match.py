"""Decides which results of other engines are used: those of a request's prompt, computed with this
engine's weights and not before these were loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.geometry.layout import Group
from vllm_commext.nixl.geometry.plan import has_state, keeps_every_token
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.params import TransferParams
from vllm_commext.nixl.wire.prompt import OtherPromptError, OtherWeightsError, check_prompt, digests

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PromptMatch:
    """Checks a prefill engine's answer against the request."""

    def __init__(self, groups: Sequence[Group], sampler: Sampler, identity: Identity) -> None:
        self._has_state = has_state(groups)
        self._leaves_last_token = not keeps_every_token(groups)
        self._sampler = sampler
        self._identity = identity

    def check(self, request: Request, transfer_params: TransferParams) -> None:
        """Refuse what is not this request's.

        Raises:
            OtherPromptError: it is another prompt's, or computed with other weights.
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
        own = digests(self._identity.prompt_of(request), remote.num_tokens)
        computed = dict(transfer_params.prompt)
        if self._identity.files is None:
            computed.pop("files", None)
        try:
            check_prompt(own, computed, source)
        except OtherWeightsError as error:
            error.remote = remote
            raise
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
        """Prompt tokens that the load brings; raises ProtocolError."""
        most = self.most_tokens(request)
        if self._has_state and remote.num_tokens > most:
            raise ProtocolError(
                f"kv_transfer_params: expected the state after at most {most} of "
                f"{request.num_prompt_tokens} prompt tokens, got that after {remote.num_tokens}: "
                "was it prefilled by this connector, with the same prompt?"
            )
        return min(remote.num_tokens, most)


CLOCK_SECONDS = 1.0
"""Allowed clock skew.  Results that another engine computed before our reload are dropped."""


class Trust:
    """The time from which other engines' results count, and pauses that outlast their leases."""

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
        """``computed_at`` is in milliseconds since 1970."""
        return computed_at >= self._trusted_from

    def pause(self) -> None:
        self._paused_since = time.monotonic()

    def resume(self) -> bool:
        """End the pause; True if other engines still keep the blocks that they kept before it."""
        since, self._paused_since = self._paused_since, None
        return since is None or time.monotonic() - since <= self._lease_seconds / 2
