"""Requests whose prompts are read while they are computed, and steps of their scheduler."""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any


def request(name: str, key: str, num_tokens: int, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": name,
        "num_prompt_tokens": num_tokens,
        "prompt_token_ids": list(range(num_tokens)),
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "resumable": False,
        "kv_transfer_params": {"do_remote_decode": True, "stream_key": key},
    }
    return SimpleNamespace(**{**values, **changes})


def step(
    new: Mapping[str, tuple[int, Any, int]] | None = None,
    cached: Mapping[str, tuple[int, Any, int]] | None = None,
    resumed: Collection[str] = (),
    preempted: Collection[str] = (),
) -> Any:
    """A step: request -> (computed tokens, blocks by group, scheduled tokens)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done, block_ids=ids)
            for name, (done, ids, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[ids for _, ids, _ in cached.values()],
            num_computed_tokens=[done for done, _, _ in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={name: count for name, (*_, count) in {**new, **cached}.items()},
        preempted_req_ids=set(preempted),
    )
