"""What engines call a block of KV cache: a hash of all that its bytes follow from.

The hash of a block covers the tokens in it, the hash of the block before it, and at the root the
engine's configuration, the block size, the LoRA adapter and the cache salt.  So equal hashes mean
equal beginnings of one tenant under one model, and a hash says nothing to who does not know them.
vLLM's own block hashes begin with a number drawn by each process and cannot be compared.

Pure.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from vllm_commext.nixl.wire.messages import HASH_BYTES

_ROOT = b"commext reuse"
_BLOCK = b"commext block"


def root_of(configuration: str, block_size: int, *, lora: str, cache_salt: str) -> bytes:
    """``HASH_BYTES`` bytes that a chain begins with.

    Args:
        configuration: digest of the facts on which engines must agree.
        block_size: tokens of a block.
        lora: what tells the LoRA adapter from others, "" for none.
        cache_salt: the request's, "" for none.
    """
    content = msgspec.msgpack.encode((configuration, block_size, lora, cache_salt))
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=_ROOT).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hash of each whole block of these tokens.

    Raises:
        OverflowError: a token id is below 0 or above 2**32 - 1.
    """
    num_blocks = len(token_ids) // block_size
    ids = np.array(token_ids[: num_blocks * block_size], dtype="<u4").tobytes()
    step, last, found = 4 * block_size, root, list[bytes]()
    for begin in range(0, len(ids), step):
        one = hashlib.blake2b(last, digest_size=HASH_BYTES, person=_BLOCK)
        one.update(ids[begin : begin + step])
        last = one.digest()
        found.append(last)
    return found
