"""What of an engine's finished requests is on offer, and until when.

Nothing is kept: the blocks are freed as ever, and vLLM's block pool tells when it hands one out
again, before it does (``unpin_blocks``, vLLM 0.32 and newer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_commext.nixl.geometry.request_blocks import NULL_BLOCK
from vllm_commext.nixl.reuse.hashes import chain, root_of
from vllm_commext.nixl.reuse.table import OfferTable
from vllm_commext.nixl.wire.prompt import Prompt, prompt_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Names:
    """What this engine and those like it call the blocks of requests.

    Args:
        configuration: gives the digest of the facts on which they agree; called once.
        block_size: tokens of a block.
    """

    def __init__(self, configuration: Callable[[], str], block_size: int) -> None:
        self._configuration = configuration
        self.block_size = block_size
        self._digest = ""

    def of(self, request: Request, num_tokens: int) -> list[bytes]:
        """The hash of each whole block of a request's first tokens; none for a request that does
        not follow from tokens alone."""
        prompt = prompt_of(request)
        if not _is_text(request, prompt):
            return []
        self._digest = self._digest or self._configuration()
        lora, salt = _adapter_of(request), prompt.cache_salt
        root = root_of(self._digest, self.block_size, lora=lora, cache_salt=salt)
        return chain(root, request.all_token_ids[:num_tokens], self.block_size)


def _adapter_of(request: Any) -> str:
    """Name and path of a request's adapter, "" for none.

    Both, as in the names of vLLM's own prefix cache: an adapter's name may be given to another one,
    while blocks of the first one are on offer.
    """
    lora = request.lora_request
    return f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else ""


def _is_text(request: Any, prompt: Prompt) -> bool:
    """Whether a request's blocks follow from its tokens, its adapter and its salt."""
    is_whole = not getattr(request, "resumable", False)  # else its tokens may be replaced
    return (
        is_whole
        and prompt.token_ids is not None
        and prompt.embeddings is None
        and not (prompt.items)
    )


def num_computed(request: Request) -> int:
    """Tokens of a finished request whose KV is there: those before the last one, which was sampled
    and is not computed any more.  That is what its answer has come of, so no step under way writes
    to it."""
    return min(request.num_computed_tokens, request.num_tokens - 1)


class Offers:
    """Blocks of finished requests, as others find them.

    Args:
        names: what blocks are called.
        table: what the side channel answers from.
        pool: vLLM's block pool.
    """

    def __init__(self, names: Names, table: OfferTable, pool: Any) -> None:
        self._names = names
        self._table = table
        self._pool = pool

    def add(self, request: Request, block_ids: Sequence[int]) -> None:
        """Offer a request's whole blocks; it has ended well and still holds them."""
        names = self._names.of(request, num_computed(request))
        count = min(len(names), len(block_ids))
        if NULL_BLOCK in block_ids[:count]:
            count = list(block_ids).index(NULL_BLOCK)
        if not count:
            return
        blocks = [self._pool.blocks[block_id] for block_id in block_ids[:count]]
        # Told of their next use, the references as they were.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._note_use)
        self._table.offer(names[:count], block_ids[:count])

    def clear(self) -> None:
        """What the blocks hold means nothing any more."""
        self._table.clear()

    def _note_use(self, block: Any) -> None:
        self._table.drop(block.block_id)
