"""Sizes of a ring and its segment, in bytes. Pure arithmetic; the C code checks what it is given.

The segment is a page with the fixed lines (header, writer, cursors), two lines of 128 bytes a
reader, padding to a page, and the ring itself. `csrc/shm/layout.h` draws the map.
"""

LINE_BYTES = 128
PAGE_BYTES = 4096
FIXED_BYTES = 8 * LINE_BYTES
READER_BYTES = 2 * LINE_BYTES
MIN_CAPACITY_BYTES = 4 << 10
MAX_CAPACITY_BYTES = 1 << 30
MAX_READERS = 4096
SMALLEST_QUEUE_BYTES = 64 << 10
LARGEST_QUEUE_BYTES = 2 << 20
LARGEST_RING_BYTES = 16 << 20


def round_up(num_bytes: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `num_bytes`."""
    return -(-num_bytes // multiple) * multiple


def segment_bytes(capacity_bytes: int, n_readers: int) -> int:
    """Length of the segment that holds a ring of this capacity for this many readers.

    Raises ValueError if there can be no such ring.
    """
    if not MIN_CAPACITY_BYTES <= capacity_bytes <= MAX_CAPACITY_BYTES:
        raise ValueError(f"capacity: expected 4 KiB to 1 GiB, got {capacity_bytes} bytes")
    if capacity_bytes & (capacity_bytes - 1):
        raise ValueError(f"capacity: expected a power of two, got {capacity_bytes} bytes")
    if not 1 <= n_readers <= MAX_READERS:
        raise ValueError(f"n_readers: expected 1 to {MAX_READERS}, got {n_readers}")
    return round_up(FIXED_BYTES + n_readers * READER_BYTES, PAGE_BYTES) + capacity_bytes


def capacity_for(
    nominal_bytes: int, free_bytes: int, largest_bytes: int = LARGEST_QUEUE_BYTES
) -> int:
    """The ring's capacity for a queue that was asked to hold `nominal_bytes`.

    A power of two of 64 KiB to `largest_bytes`: the quarter of it that is used while readers keep
    up is enough for streaming and small enough for the cores' caches; what busy readers have not
    taken goes beyond the ring. And no more than a sixteenth of what is free in /dev/shm, so that
    all the queues of a server find room in a small one.
    """
    wanted = max(nominal_bytes, SMALLEST_QUEUE_BYTES)
    limit = min(largest_bytes, max(free_bytes // 16, SMALLEST_QUEUE_BYTES))
    above = 1 << (wanted - 1).bit_length()
    return min(above, 1 << (limit.bit_length() - 1))
