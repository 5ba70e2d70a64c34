"""Prompts that engines hold: a request goes where the beginning of its prompt has been computed, or
what came before in its conversation."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

MIN_WEIGHT = 16.0
"""Tokens: the least that a remembered prompt counts for, about one block of an engine's cache."""
MAX_SHARE = 0.25
"""Of an engine's memory, what a single block or session counts for at most."""
BLOCK_BYTES = 1024
"""About 250 tokens of text, or as many token ids as vLLM has in a dozen blocks."""
MAX_BLOCKS = 256
"""Looked at of each prompt, so that a large one costs some milliseconds and no more."""
_DIGEST_BYTES = 12
SESSION_HEADER = "X-Session-ID"
_IN_USER_ID = re.compile(r"session.{0,8}?([0-9a-f]{8}-[0-9a-f-]{27})")


@dataclass(frozen=True)
class Prefix:
    """Digests of a request: of the prompt's blocks, each of about tokens_a_block tokens, and of the
    session's name (b"": none). tokens: estimate of the whole prompt's."""

    blocks: tuple[bytes, ...] = ()
    tokens_a_block: float = 0.0
    session: bytes = b""
    tokens: int = 0

    @classmethod
    def of(
        cls,
        names: Iterable[bytes | memoryview],
        text: bytes,
        num_bytes: int,
        session: str | None,
        tokens: int,
    ) -> Self:
        """Digest a prompt of *num_bytes* and about *tokens* that begins with *text*. *names*: what
        else must be equal for a cache to serve it, such as the model and the cache salt."""
        if len(text) < BLOCK_BYTES and not session:
            return cls(tokens=tokens)
        digest = salt = _digest(*names)
        blocks: list[bytes] = []
        for start in range(0, len(text) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES):
            digest = _digest(digest, text[start : start + BLOCK_BYTES])
            blocks.append(digest)
        name = _digest(salt, session.encode("utf-8", "surrogatepass")) if session else b""
        return cls(tuple(blocks), tokens * BLOCK_BYTES / max(num_bytes, 1), name, tokens)


NO_PREFIX = Prefix()


def _digest(*parts: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def session_of(body: Mapping[str, Any], header: str | None) -> str | None:
    """Name of the conversation: as engines read it, or as agents write it."""
    names = (header, body.get("session_id"), body.get("prompt_cache_key"))
    named = next((name for name in names if isinstance(name, str) and name), None)
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _IN_USER_ID.search(user) if isinstance(user, str) and not named else None
    return found[1] if found else named


class _Recent(OrderedDict[bytes, float]):
    """The latest keys, up to a sum of weights. None weighs less than ``MIN_WEIGHT``."""

    def __init__(self, max_weight: float) -> None:
        super().__init__()
        self._max_weight, self._sum = max_weight, 0.0

    def put(self, key: bytes, weight: float) -> None:
        weight = max(min(weight, self._max_weight * MAX_SHARE), MIN_WEIGHT)
        self._sum += weight - self.pop(key, 0.0)
        self[key] = weight
        while self._sum > self._max_weight and self:
            self._sum -= self.popitem(last=False)[1]


class Memory:
    """Prompts that one engine was asked last, of about *max_tokens* in all; the oldest go first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def held_tokens(self, prefix: Prefix) -> int:
        """Estimate the prompt's first tokens that the engine holds; the last is always computed."""
        held = 0.0
        for block in prefix.blocks:
            if block not in self._blocks:
                break
            held += prefix.tokens_a_block
        if prefix.session:
            held = max(held, self._sessions.get(prefix.session, 0.0))
        return max(0, min(int(held), prefix.tokens - 1)) if held else 0

    def note(self, prefix: Prefix) -> None:
        # The last block first: a prompt is forgotten from its end, as engines forget it too.
        for block in reversed(prefix.blocks):
            self._blocks.put(block, prefix.tokens_a_block)
        if prefix.session:
            self._sessions.put(prefix.session, float(prefix.tokens))

    def __len__(self) -> int:
        return len(self._blocks) + len(self._sessions)

    def clear(self) -> None:
        self._blocks = _Recent(self._max_tokens)
        self._sessions = _Recent(self._max_tokens)
