"""The request parameters (``kv_transfer_params``) that a router carries from prefill to decode
engine.

Names and meaning are those of vLLM's own NIXL connector, so that routers written for it work
unchanged; those in ``OWN_FIELDS`` are ours, which a router passes on like the others. Where the
side channel has a secret, ``remote_seal`` proves all of them."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.description import MAX_ROWS
from vllm_commext.nixl.wire.messages import KEY_DIGITS, MAX_RANKS, PROTOCOL_VERSION, Port, Ranks
from vllm_commext.nixl.wire.prompt import DIGEST_DIGITS, PARTS
from vllm_commext.nixl.wire.seal import SECRET_VARIABLE, check_params, is_proof, prove_params

if TYPE_CHECKING:
    from vllm.v1.request import Request

# ValueError: also text with lone surrogates, which JSON has.
NOT_CONVERTED = (msgspec.ValidationError, ValueError, TypeError, OverflowError, RecursionError)
_PLACES = "reuse_from"
PLACE_SEAL = "remote_place_seal"
MAX_PLACES = 16


class _SideChannel(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    port: Port
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
    """Host and port of the side channels of engines that may have blocks of a request's prompt;
    raises ProtocolError."""
    named = (params or {}).get(_PLACES)
    if named is None:
        return []
    try:
        places = msgspec.convert(named, Annotated[list[_SideChannel], Meta(max_length=MAX_PLACES)])
    except NOT_CONVERTED as error:
        raise ProtocolError(
            f"kv_transfer_params: expected {_PLACES} as a list of host, port and seal, got "
            f"{reprlib.repr(named)}: {error}"
        ) from error
    for place in places:
        _check_place(secret, place.host, place.port, place.seal, _PLACES)
    return list(dict.fromkeys((place.host, place.port) for place in places))


def _told(error: Exception, params: Mapping[str, Any]) -> str:
    """A conversion's error, with the value that came where it names a field that is there."""
    named = re.search(r"`\$\.(\w+)", str(error))
    if named is None or named[1] not in params:
        return str(error)
    return f"{error}, got {reprlib.repr(params[named[1]])}"


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"expected {name} from {low} to {high}, got {value}")


MAX_BLOCKS = 1 << 24
MAX_GROUPS = 1024
MAX_INT = (1 << 31) - 1
MAX_SAMPLING_CHARACTERS = 256
MAX_MILLISECONDS = (1 << 53) - 1  # as far as every router keeps numbers
OWN_FIELDS = (
    "remote_protocol",
    "remote_incarnation",
    "remote_fence_slot",
    "remote_fence_nonce",
    "remote_prompt",
    "remote_first_token",
    "remote_sampling",
    "remote_computed_at",
    "remote_seal",
)
ANSWER = "answer_token_ids"
"""What another decode engine has answered so far, which a router sets: the answer goes on here."""
PIECES = "answer_pieces"
"""How many of these tokens each of its events had there, which a router sets."""
TELLS, COMPUTED_BY = "tells_computed_by", "computed_by"
MARK_BITS = 32
"""A router asks by the one what computes an answer, an engine core tells its API server by the
other, and the prompt's first id has it above these bits for the router."""
_NONCE = re.compile("[0-9a-f]{16}")
_KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")
_DIGEST = re.compile(f"[0-9a-f]{{{DIGEST_DIGITS}}}")


@dataclass(frozen=True)
class TransferParams:
    """A finished prefill as a router carries it.

    Attributes:
        first_token: sampled after the prompt, -1 where none is handed over.
        computed_at: milliseconds since 1970 of the prefill engine's clock; 0 where it is not said.
    """

    remote: RemoteRequest
    prompt: Mapping[str, str] = field(default_factory=dict[str, str])
    first_token: int = -1
    sampling: str = ""
    computed_at: int = 0


class _RemoteParams(msgspec.Struct, kw_only=True):
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Port
    remote_block_ids: Annotated[list[list[int]], Meta(min_length=1, max_length=MAX_GROUPS)]
    remote_num_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)]
    tp_size: Ranks
    pp_size: Ranks
    remote_protocol: int
    remote_incarnation: str = ""
    remote_fence_slot: Annotated[int, Meta(ge=0, le=MAX_INT)]
    remote_fence_nonce: str = ""
    remote_prompt: dict[str, str] = {}
    remote_first_token: Annotated[int, Meta(ge=-1, le=MAX_INT)] = -1
    remote_sampling: Annotated[str, Meta(max_length=MAX_SAMPLING_CHARACTERS)] = ""
    remote_computed_at: Annotated[int, Meta(ge=0, le=MAX_MILLISECONDS)] = 0
    remote_seal: str = ""


_SAME = {
    **{
        f"remote_{name}": name
        for name in ("engine_id", "request_id", "host", "port", "num_tokens", "incarnation")
    },
    **{"remote_fence_slot": "fence_slot", "tp_size": "tp_size", "pp_size": "pp_size"},
}
"""Fields that are those of the remote request, by their names here."""


def params_of(request: Request) -> dict[str, Any] | None:
    """What a request asks of the connector, None for nothing: what is no object asks for nothing,
    as a client of vLLM's can put there whatever JSON has (``vllm_xargs``)."""
    params: Any = request.kv_transfer_params
    return params if isinstance(params, dict) else None


def is_for_prefill(params: Mapping[str, Any] | None) -> bool:
    return bool(params and params.get("do_remote_decode"))


def is_for_decode(params: Mapping[str, Any] | None) -> bool:
    return bool(params and params.get("do_remote_prefill"))


def read_params(params: Mapping[str, Any], secret: bytes | None = None) -> TransferParams:
    """Read what a prefill engine returned.

    Raises:
        ProtocolError: they are not this connector's, of another version of it, not proven, or a
            field is missing, of a wrong type or out of range; the message names it.
    """
    if not any(name in params for name in OWN_FIELDS):
        raise ProtocolError(
            "kv_transfer_params carry no field of CommextNixlConnector: the prefill engine runs "
            "another connector, or the router drops fields that it does not know. Start both "
            "engines with CommextNixlConnector and let the router pass all parameters on"
        )
    version = params.get("remote_protocol")
    if version not in (PROTOCOL_VERSION, str(PROTOCOL_VERSION)):
        raise ProtocolError(
            f"kv_transfer_params: expected remote_protocol {PROTOCOL_VERSION}, got "
            f"{reprlib.repr(version)}: install the same vllm-commext on both engines (0.2 has "
            "none), and let the router pass all parameters on"
        )
    try:
        remote = msgspec.convert(dict(params), _RemoteParams, strict=False)
    except NOT_CONVERTED as error:
        raise ProtocolError(
            "kv_transfer_params are not those of a finished prefill "
            f"({_told(error, params)}): send what the prefill engine returned, unchanged"
        ) from error
    _check_seal(remote, secret)
    check_range("tp_size * pp_size", remote.tp_size * remote.pp_size, 1, MAX_RANKS)
    num_blocks = sum(len(block_ids) for block_ids in remote.remote_block_ids)
    check_range("blocks in remote_block_ids", num_blocks, 0, MAX_BLOCKS)
    _check_prompt(remote.remote_prompt)
    return TransferParams(
        _remote_of(remote),
        remote.remote_prompt,
        remote.remote_first_token,
        remote.remote_sampling,
        remote.remote_computed_at,
    )


def answer_of(params: Mapping[str, Any] | None, num_tokens: int, most: int | None) -> list[int]:
    """The tokens with which a request's answer begins, empty where the parameters say none, or what
    cannot be: tokens that the model, of *num_tokens*, does not have, or more than *most*."""
    told = (params or {}).get(ANSWER)
    if not isinstance(told, list) or len(told) > (most or 0):
        return []
    is_answer = all(type(token) is int and 0 <= token < num_tokens for token in told)
    return told if is_answer else []


def pieces_of(params: Mapping[str, Any] | None, answer: list[int]) -> list[list[int]]:
    """An answer's tokens in the pieces that the parameters say, or one by one."""
    told: Any = (params or {}).get(PIECES)
    is_told = isinstance(told, list) and all(type(size) is int and size > 0 for size in told)
    if not is_told or sum(told) != len(answer):
        return [[token] for token in answer]
    ends = list(accumulate(told))
    return [answer[end - size : end] for size, end in zip(told, ends, strict=True)]


def key_of(params: Mapping[str, Any] | None) -> str:
    return as_key((params or {}).get("stream_key"))


def as_key(value: Any) -> str:
    return value if isinstance(value, str) and _KEY.fullmatch(value) else ""


def asks_for_stream(params: Mapping[str, Any] | None) -> bool:
    """Whether a prompt is to be read while another engine computes it: its blocks are not named."""
    blocks = (params or {}).get("remote_block_ids")
    return is_for_decode(params) and blocks is None and key_of(params) != ""


def transfer_params_of_stream(remote: RemoteRequest, prompt: Mapping[str, str]) -> TransferParams:
    """A side channel's word of a stream as parameters; raises ProtocolError out of range."""
    check_range("tp_size * pp_size", remote.tp_size * remote.pp_size, 1, MAX_RANKS)
    check_range("tokens", remote.num_tokens, 1, MAX_INT)
    check_range("row", remote.stream_row, 0, MAX_ROWS - 1)
    check_range("fence_slot", remote.fence_slot, 0, MAX_INT)
    _check_prompt(prompt)
    return TransferParams(remote, prompt)


def write_params(
    transfer_params: TransferParams, secret: bytes | None = None, *, chunk_tokens: int = 0
) -> dict[str, Any]:
    """The parameters that a prefill engine returns for a finished request.

    With ``chunk_tokens``, the most of a step where prompts are read while they are computed, go
    ``remote_chunk_tokens`` and ``remote_place_seal``, which proves host and port to decode engines.
    """
    remote = transfer_params.remote
    written = _RemoteParams(
        **{name: getattr(remote, of) for name, of in _SAME.items()},
        remote_block_ids=[list(group) for group in remote.block_ids],
        remote_protocol=PROTOCOL_VERSION,
        remote_fence_nonce=f"{remote.fence_nonce:016x}",
        remote_prompt=dict(transfer_params.prompt),
        remote_first_token=transfer_params.first_token,
        remote_sampling=transfer_params.sampling,
        remote_computed_at=transfer_params.computed_at,
    )
    if secret is not None:
        written.remote_seal = prove_params(secret, msgspec.structs.asdict(written))
    fields = msgspec.to_builtins(written)
    if transfer_params.first_token < 0:
        del fields["remote_first_token"], fields["remote_sampling"]
    if chunk_tokens:
        fields["remote_chunk_tokens"] = chunk_tokens
        fields[PLACE_SEAL] = prove_place(secret, remote.host, remote.port)
    return {"do_remote_prefill": True, "do_remote_decode": False, **fields, "transfer_mode": "pull"}


def _check_seal(remote: _RemoteParams, secret: bytes | None) -> None:
    proof, remote.remote_seal = remote.remote_seal, ""
    if secret is None:
        if proof:
            raise ProtocolError(
                "kv_transfer_params are sealed with a secret, but this decode engine has none: set "
                f"side_channel_secret_file (or {SECRET_VARIABLE}) on both engines, or on none"
            )
        return
    check_params(secret, msgspec.structs.asdict(remote), proof)


def _check_prompt(prompt: Mapping[str, str]) -> None:
    """Refuse what is no digest of a prompt; a prompt has tokens or embeddings."""
    known = prompt.keys() <= PARTS.keys() and prompt.keys() & {"tokens", "embeddings"}
    if not known or not all(_DIGEST.fullmatch(one) for one in prompt.values()):
        raise ProtocolError(
            f"kv_transfer_params: expected remote_prompt with SHA-256 digests of {list(PARTS)}, "
            f"tokens or embeddings among them, got {str(dict(prompt))[:100]!r}: let the router "
            "pass all parameters on"
        )


def _remote_of(remote: _RemoteParams) -> RemoteRequest:
    return RemoteRequest(
        **{of: getattr(remote, name) for name, of in _SAME.items()},
        block_ids=tuple(tuple(block_ids) for block_ids in remote.remote_block_ids),
        fence_nonce=_read_nonce(remote),
    )


def _read_nonce(remote: _RemoteParams) -> int:
    """The fence's nonce; it is text as not all routers keep 64-bit numbers."""
    nonce = remote.remote_fence_nonce
    if not _NONCE.fullmatch(nonce):
        raise ProtocolError(
            "kv_transfer_params: expected remote_fence_nonce of 16 hexadecimal digits, got "
            f"{nonce[:32]!r}"
        )
    return int(nonce, 16)
