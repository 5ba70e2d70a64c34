"""A request whose prompt is read while it is computed, as a prefill engine's scheduler has it."""

from types import SimpleNamespace
from typing import Any


def request(name: str, key: str, num_tokens: int, **changes: Any) -> Any:
    """With what our connector looks at of vLLM's ``Request``; *changes* are by its attributes."""
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
