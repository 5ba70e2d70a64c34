"""Random damage to a queue's segment and to its address: an error or a message, never a crash.

python tests/unit/shm/stress_fuzz.py --rounds 20000
"""

import mmap
import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stress import arguments

from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.shm.ring import PeerLostError, RingAddress, RingReader, RingWriter

CAPACITY = 4096
REFUSED = (ProtocolError, PeerLostError, CommextTimeoutError)


def damage(rng: random.Random, memory: mmap.mmap) -> None:
    """A few bytes anywhere, or where the fixed lines and the first records are."""
    for _ in range(rng.randint(1, 4)):
        end = rng.choice((64, 1536, 4096 + 256, len(memory)))
        size = rng.choice((1, 4, 8))
        place = rng.randrange(end - size)
        small = (1 << 20).to_bytes(8, "little")[:size]
        content = rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size, small))
        memory[place : place + size] = content


def damaged_address(rng: random.Random, address: RingAddress) -> RingAddress:
    field = rng.choice(("name", "nonce", "capacity_bytes", "n_readers", "version"))
    value = getattr(address, field)
    if isinstance(value, int):
        return replace(address, **{field: rng.choice((0, -1, value * 2, value + 1, 1 << 40))})
    if isinstance(value, bytes):
        return replace(address, nonce=rng.randbytes(rng.choice((0, 15, 16, 17))))
    return replace(address, name=rng.choice(("", "/", "..", value[:-1], value + "0", "a" * 5000)))


def one_round(rng: random.Random) -> bool:
    budget = rng.choice((0, 1 << 20))
    writer = RingWriter.create(2, CAPACITY, budget)
    address, before = writer.address, rng.random() < 0.5
    try:
        with (Path("/dev/shm") / address.name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        for size in rng.choices((0, 5, 100, 6000 if budget else 900), k=3):
            writer.write((b"a" * size, b"b" * size) if size % 2 else b"c" * size)
        if rng.random() < 0.2:
            address = damaged_address(rng, address)
        elif before:
            damage(rng, memory)
        reader = RingReader.attach(address, 0)
        if not before:
            damage(rng, memory)
        for _ in range(3):
            reader.read(timeout=0)
        with suppress(CommextTimeoutError):
            writer.write(b"d" * 3 * CAPACITY, timeout=0)
    except REFUSED:
        return True
    finally:
        writer.close()
    return False


if __name__ == "__main__":
    given = arguments(__doc__, "rounds").parse_args()
    numbers = random.Random(given.seed)
    noticed = sum(one_round(numbers) for _ in range(given.rounds))
    sys.stdout.write(f"{given.rounds} rounds, seed {given.seed}: {noticed} times it was noticed\n")
