"""Any order of writes and reads on a ring behaves like a list for each reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from tests.kit.examples import examples
from vllm_commext.errors import CommextTimeoutError
from vllm_commext.shm.ring import RingReader, RingWriter

CAPACITY = 4096
ENOUGH = 1 << 30  # to go behind the ring, so that no write waits
SIZES = st.one_of(st.integers(0, 400), st.integers(0, 3 * CAPACITY))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), SIZES),
        st.tuples(st.just("write"), st.lists(SIZES, min_size=2, max_size=5)),
        st.tuples(st.just("read"), st.integers(0, 1)),
    ),
    max_size=60,
)


@examples(50)
@given(STEPS, st.sampled_from([0, 1, 5000, 64 << 10, ENOUGH]))
def test_any_order_of_writes_and_reads_behaves_like_a_list(
    steps: list[tuple[str, object]], budget: int
) -> None:
    writer = RingWriter.create(2, CAPACITY, budget)
    readers = [RingReader.attach(writer.address, rank) for rank in (0, 1)]
    sent: list[object] = []
    seen = [0, 0]
    for number, (kind, what) in enumerate(steps):
        if kind == "read":
            rank = what
            assert isinstance(rank, int)
            if seen[rank] < len(sent):
                assert readers[rank].read(timeout=0) == sent[seen[rank]]
                seen[rank] += 1
            else:
                with pytest.raises(CommextTimeoutError):
                    readers[rank].read(timeout=0)
            continue
        letter = bytes([number % 256])
        record = tuple(letter * n for n in what) if isinstance(what, list) else letter * what
        try:
            writer.write(record, timeout=0)
        except CommextTimeoutError:
            assert budget < ENOUGH
            continue
        sent.append(list(record) if isinstance(record, tuple) else record)
    for rank, reader in enumerate(readers):
        assert [reader.read(timeout=0) for _ in sent[seen[rank] :]] == sent[seen[rank] :]
