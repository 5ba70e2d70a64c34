"""Which backend the dispatcher sends a tensor to, in a group of one rank that each backend sums."""

from collections.abc import Sequence

import pytest
import torch

from vllm_commext.allreduce import dispatcher as dispatchers
from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.limits import PACK_BYTES, Message
from vllm_commext.allreduce.table import Row, Table

SMALL, LARGE = limits.PUSH, limits.NCCL
TABLE = Table(1, {"float32": (Row(64, (SMALL, LARGE)), Row(4096, (LARGE, SMALL)))}, "a test")


class OneRank:
    """Sums over one rank: a copy. Takes messages up to a size, once it was prepared for them."""

    def __init__(self, name: str, max_bytes: int = 1 << 20, prepared: bool = True) -> None:
        self.name, self._max_bytes, self._prepared = name, max_bytes, prepared
        self.given: list[torch.Tensor] = []
        self.asked: list[Message] = []
        self.destroyed = 0

    def takes(self, message: Message) -> bool:
        return message.num_bytes <= self._max_bytes

    def prepare(self, message: Message) -> None:
        self.asked.append(message)
        self._prepared = True

    def is_ready(self, message: Message) -> bool:
        return self._prepared

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(tensor)
        return tensor.clone()

    def destroy(self) -> None:
        self.destroyed += 1


def made(*backends: OneRank, table: Table | None = TABLE, forced: str | None = None) -> Dispatcher:
    return Dispatcher(backends, 1, table, forced)


def summed(dispatcher: Dispatcher, sizes: Sequence[int]) -> None:
    for size in sizes:
        tensor = torch.arange(float(size))
        got = dispatcher.all_reduce(tensor)
        assert got is not None
        assert got is not tensor
        assert torch.equal(got, tensor)


def test_each_size_goes_to_the_fastest_and_is_counted() -> None:
    small, large = OneRank(SMALL), OneRank(LARGE)
    dispatcher = made(small, large)
    summed(dispatcher, [16, 17, 16, 1024])  # 64 bytes, beyond them, 64 again, 4096
    assert [len(each.given) for each in (small, large)] == [2, 2]
    assert dispatcher.counts() == ({SMALL: 2, LARGE: 2}, {})
    assert dispatcher.choice(torch.zeros(16)) == SMALL
    assert dispatcher.choice(torch.zeros(17)) == LARGE
    assert dispatcher.counts()[0].total() == 4  # asking is no call


def test_what_nobody_knows_is_left_to_vllm() -> None:
    small = OneRank(SMALL)
    dispatcher = made(small)
    assert dispatcher.all_reduce(torch.zeros(1025)) is None  # beyond the table
    assert dispatcher.all_reduce(torch.zeros(16, dtype=torch.int64)) is None
    assert dispatcher.choice(torch.zeros(1025)) == limits.VLLM
    assert dispatcher.counts() == ({limits.VLLM: 2}, {})
    assert made(small, table=None).all_reduce(torch.zeros(4)) is None
    assert small.given == small.asked == []


def test_who_cannot_take_it_is_passed_over_and_counted_as_refusing() -> None:
    small, large = OneRank(SMALL), OneRank(LARGE, max_bytes=64)
    dispatcher = made(small, large)
    summed(dispatcher, [100, 100])
    assert (len(small.given), len(large.given)) == (2, 0)
    assert dispatcher.counts() == ({SMALL: 2}, {LARGE: 2})
    assert dispatcher.choice(torch.zeros(100)) == SMALL
    nobody = made(OneRank(SMALL, 8), OneRank(LARGE, 8))
    assert nobody.all_reduce(torch.zeros(100)) is None
    assert nobody.counts() == ({limits.VLLM: 1}, {LARGE: 1, SMALL: 1})


def test_a_forced_backend_serves_every_size_and_is_prepared_without_a_table() -> None:
    small, large = OneRank(SMALL), OneRank(LARGE)
    dispatcher = made(small, large, table=None, forced=LARGE)
    rows = torch.ones(3, 5)
    assert torch.equal(dispatcher.all_reduce(rows), rows)
    assert large.asked == [Message((3, 5), "float32")]
    assert small.asked == small.given == []
    for unfit in (OneRank(LARGE, 8), OneRank(limits.CUSTOM)):
        assert made(small, unfit, forced=LARGE).all_reduce(rows) is None
    assert made(small, large, forced=limits.VLLM).all_reduce(rows) is None
    assert small.given == []


def test_only_messages_of_rows_are_prepared_for_and_only_by_whoever_leads_somewhere() -> None:
    leads, never = OneRank(SMALL), OneRank(LARGE)
    dispatcher = made(leads, never, table=Table(1, {"float32": (Row(64, (SMALL, LARGE)),)}, ""))
    dispatcher.all_reduce(torch.zeros(4, 500))  # beyond the table, as vLLM's first message is
    dispatcher.all_reduce(torch.zeros(4))
    dispatcher.all_reduce(torch.zeros(2, 2, 2))
    dispatcher.all_reduce(torch.zeros(2, 2, dtype=torch.int64))
    assert leads.asked == [Message((4, 500), "float32")]
    assert never.asked == []


PLAIN = torch.arange(64.0).view(8, 8)


@pytest.mark.parametrize(
    "tensor",
    [PLAIN, PLAIN[:, ::2], PLAIN.t(), torch.zeros(33)[1:]],
    ids=["plain", "gaps", "transposed", "odd address"],
)
def test_a_backend_gets_plain_memory_and_the_result_has_the_tensors_layout(
    tensor: torch.Tensor,
) -> None:
    backend = OneRank(SMALL)
    got = made(backend, forced=SMALL).all_reduce(tensor)
    assert got is not None
    assert torch.equal(got, tensor)
    assert got.stride() == torch.empty_like(tensor).stride()
    [given] = backend.given
    assert given.is_contiguous()
    assert given.data_ptr() % PACK_BYTES == 0
    assert (given is tensor) == (tensor is PLAIN) == (given.data_ptr() == tensor.data_ptr())


def test_no_elements_need_no_backend() -> None:
    backend = OneRank(SMALL)
    dispatcher = made(backend)
    got = dispatcher.all_reduce(torch.zeros(0, 7))
    assert got.shape == (0, 7)
    assert backend.given == backend.asked == []
    assert dispatcher.counts() == ({}, {})


def test_no_more_plans_are_kept_than_the_bound_and_none_is_lost_from_the_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatchers, "MAX_PLANS", 3)
    dispatcher = made(OneRank(SMALL), OneRank(LARGE))
    for number, size in enumerate(range(1, 9)):
        summed(dispatcher, [size])
        assert len(dispatcher._plans) == number % 3 + 1
    assert dispatcher.counts()[0] == {SMALL: 8}


def test_a_captures_choice_is_kept_only_where_nobody_was_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatchers, "_is_capturing", lambda _: True)
    small, large = OneRank(SMALL, prepared=False), OneRank(LARGE)
    dispatcher = made(small, large)
    summed(dispatcher, [16])
    assert (len(large.given), small.asked, dispatcher._plans) == (1, [], {})
    small.prepare(Message((16,), "float32"))
    summed(dispatcher, [16])
    assert len(small.given) == len(dispatcher._plans) == 1


def test_after_its_end_it_leaves_all_to_vllm() -> None:
    small, large = OneRank(SMALL), OneRank(LARGE)
    dispatcher = made(small, large, forced=SMALL)
    summed(dispatcher, [16])
    dispatcher.destroy()
    assert (small.destroyed, large.destroyed) == (1, 1)
    assert dispatcher.all_reduce(torch.zeros(16)) is None
    assert dispatcher.counts()[0] == {SMALL: 1, limits.VLLM: 1}
