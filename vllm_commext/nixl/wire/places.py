"""Side channels that request parameters name for a decode engine to ask; a secret proves each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.wire.seal import SECRET_VARIABLE, is_proof, prove_params

# ValueError: also text with lone surrogates, which JSON has.
NOT_CONVERTED = (msgspec.ValidationError, ValueError, TypeError, OverflowError, RecursionError)
_PLACES = "reuse_from"
PLACE_SEAL = "remote_place_seal"
MAX_PLACES = 16


class _SideChannel(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    port: int
    seal: str = ""


def place_of_stream(params: Mapping[str, Any], secret: bytes | None = None) -> tuple[str, int]:
    """Host and port of the side channel to ask; raises ProtocolError without, or not proven."""
    host, port = params.get("remote_host"), params.get("remote_port")
    is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
    if not isinstance(host, str) or not host or not isinstance(port, int) or not is_port:
        raise ProtocolError(
            "kv_transfer_params: expected with stream_key the prefill engine's remote_host and "
            f"remote_port, got {host!r} and {port!r}"
        )
    _check_place(secret, host, port, params.get(PLACE_SEAL), PLACE_SEAL)
    return host, port


def write_place(host: str, port: int, secret: bytes | None = None) -> dict[str, Any]:
    """How a router names an engine that has blocks on offer, one of a list under ``reuse_from``;
    the secret proves that it is one."""
    return msgspec.to_builtins(_SideChannel(host, port, prove_place(secret, host, port)))


def prove_place(secret: bytes | None, host: str, port: int) -> str:
    """What proves that an engine's side channel is there; empty without a secret."""
    return "" if secret is None else prove_params(secret, _SideChannel(host, port))


def _check_place(secret: bytes | None, host: str, port: int, proof: Any, name: str) -> None:
    if secret is None or is_proof(proof, prove_place(secret, host, port)):
        return
    raise ProtocolError(
        f"kv_transfer_params: expected {name} to prove host {host!r} and port {port} by the side "
        f"channel's secret, got {'another proof' if proof else 'no proof'}: let the router pass on "
        "host, port and seal as the engine there has told them, and give all engines the same "
        f"vllm-commext and the same side_channel_secret_file (or {SECRET_VARIABLE})"
    )


def places_for_reuse(
    params: Mapping[str, Any] | None, secret: bytes | None = None
) -> list[tuple[str, int]]:
    """Host and port of the side channels of engines that may have blocks of a request's prompt.

    Raises:
        ProtocolError: they are not those of engines, or not proven.
    """
    named = (params or {}).get(_PLACES)
    if named is None:
        return []
    try:
        places = msgspec.convert(named, list[_SideChannel])
    except NOT_CONVERTED as error:
        raise ProtocolError(
            f"kv_transfer_params: expected {_PLACES} as a list of host, port and seal: {error}"
        ) from error
    check_range(f"len({_PLACES})", len(places), 0, MAX_PLACES)
    for place in places:
        check_range(f"port in {_PLACES}", place.port, 1, 65535)
        _check_place(secret, place.host, place.port, place.seal, _PLACES)
    return list(dict.fromkeys((place.host, place.port) for place in places))


def check_range(
    name: str, value: float, low: float, high: float, what: str = "kv_transfer_params"
) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"{what}: expected {name} from {low} to {high}, got {value}")
