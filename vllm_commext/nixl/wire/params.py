"""The request parameters (``kv_transfer_params``) that a router carries from prefill to decode
engine.

Names and meaning are those of vLLM's own NIXL connector, so that routers written for it work
unchanged; ours are ``remote_incarnation``, ``remote_fence_slot`` and ``remote_fence_nonce``, which
a router passes on like the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.requests import RemoteRequest

MAX_BLOCKS = 1 << 24
MAX_GROUPS = 1024
MAX_RANKS = 1024  # a load may have a part for each, and what is derived from each number is kept
MAX_INT = (1 << 31) - 1
_NONCE = re.compile("[0-9a-f]{16}")


class _RemoteParams(msgspec.Struct):
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    tp_size: int = 1
    remote_num_tokens: int | None = None
    remote_incarnation: str = ""
    remote_fence_slot: int = -1
    remote_fence_nonce: str = ""


def is_for_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will decode the request."""
    return bool(params and params.get("do_remote_decode"))


def is_for_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine has prefilled the request."""
    return bool(params and params.get("do_remote_prefill"))


def read_params(params: Mapping[str, Any], num_prompt_tokens: int) -> RemoteRequest:
    """Read what a prefill engine returned.

    Args:
        params: the parameters as they came with the decode request.
        num_prompt_tokens: tokens of the prompt; what the blocks hold where the parameters do not
            say.

    Raises:
        ProtocolError: a field is missing, of a wrong type or out of range; the message names it.
    """
    try:
        remote = msgspec.convert(dict(params), _RemoteParams, strict=False)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ProtocolError(
            f"kv_transfer_params are not those of a finished prefill ({error}): send what the "
            "prefill engine returned, unchanged"
        ) from error
    _check_range("remote_port", remote.remote_port, 1, 65535)
    _check_range("tp_size", remote.tp_size, 1, MAX_RANKS)
    _check_range("len(remote_block_ids)", len(remote.remote_block_ids), 1, MAX_GROUPS)
    num_blocks = sum(len(block_ids) for block_ids in remote.remote_block_ids)
    _check_range("blocks in remote_block_ids", num_blocks, 0, MAX_BLOCKS)
    _check_range("remote_fence_slot", remote.remote_fence_slot, -1, MAX_INT)
    num_tokens = num_prompt_tokens if remote.remote_num_tokens is None else remote.remote_num_tokens
    _check_range("remote_num_tokens", num_tokens, 0, MAX_INT)
    return RemoteRequest(
        engine_id=remote.remote_engine_id,
        incarnation=remote.remote_incarnation,
        host=remote.remote_host,
        port=remote.remote_port,
        tp_size=remote.tp_size,
        request_id=remote.remote_request_id,
        block_ids=tuple(tuple(block_ids) for block_ids in remote.remote_block_ids),
        num_tokens=num_tokens,
        fence_slot=remote.remote_fence_slot,
        fence_nonce=_read_nonce(remote),
    )


def write_params(remote: RemoteRequest) -> dict[str, Any]:
    """The parameters that a prefill engine returns for a finished request."""
    block_ids = [list(group) for group in remote.block_ids]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": remote.engine_id,
        "remote_request_id": remote.request_id,
        "remote_host": remote.host,
        "remote_port": remote.port,
        "remote_block_ids": block_ids,
        "remote_num_tokens": remote.num_tokens,
        "remote_incarnation": remote.incarnation,
        "remote_fence_slot": remote.fence_slot,
        "remote_fence_nonce": f"{remote.fence_nonce:016x}",
        "tp_size": remote.tp_size,
        "transfer_mode": "pull",
    }


def _read_nonce(remote: _RemoteParams) -> int:
    """The fence's nonce, 0 without a fence; it is text as not all routers keep 64-bit numbers."""
    nonce = remote.remote_fence_nonce
    if remote.remote_fence_slot < 0:
        return 0
    if not _NONCE.fullmatch(nonce):
        raise ProtocolError(
            "kv_transfer_params: expected remote_fence_nonce of 16 hexadecimal digits, got "
            f"{nonce[:32]!r}"
        )
    return int(nonce, 16)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ProtocolError(
            f"kv_transfer_params: expected {name} from {low} to {high}, got {value}"
        )
