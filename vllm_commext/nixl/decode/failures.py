"""What the log and the metrics say of loads that fail."""

from __future__ import annotations

from vllm_commext.errors import CommextError, ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.loads import Failure
from vllm_commext.nixl.requests import RemoteRequest


def handshake_failure(error: CommextError) -> Failure:
    """Why a load fails whose peer could not be made ready."""
    unfit = isinstance(error, UnsupportedError)
    return Failure("configuration" if unfit else "handshake", error)


def restarted(remote: RemoteRequest) -> Failure:
    """Why a load fails whose parameters are of another start of the prefill engine."""
    text = (
        f"the prefill engine {remote.engine_id!r} was restarted since it computed this request: "
        "its blocks are gone"
    )
    return Failure("expired", ProtocolError(text))


def describe_source(remote: RemoteRequest | None) -> str:
    """The prefill engine and request that a message is about."""
    if remote is None:
        return "an unknown prefill engine"
    return (
        f"prefill engine {remote.engine_id!r} at {remote.host}:{remote.port} (request "
        f"{remote.request_id} there)"
    )
