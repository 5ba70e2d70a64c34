"""Messages, tables, policy and the arithmetic of tuning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.allreduce import cache, limits
from vllm_commext.allreduce import machine as machines
from vllm_commext.allreduce import table as tables
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.limits import ITEM_BYTES, message_of_bytes
from vllm_commext.allreduce.machine import Machine
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.errors import ConfigError

bounded = settings(max_examples=60)
MIB = 1 << 20
MACHINE = Machine("NVIDIA H200", "NV18", "580.1", "2.11.0", "2.28.3", "0.7.0", "0.32.0")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def with_other(**facts: Any) -> Machine:
    return msgspec.structs.replace(MACHINE, **facts)


SIZES = st.integers(1, 64 * MIB)
TIMES = st.dictionaries(
    st.integers(0, 20).map(lambda exponent: 2048 << exponent),
    st.dictionaries(
        st.sampled_from(limits.BACKENDS), st.floats(1, 1e4, allow_nan=False), min_size=1, max_size=5
    ),
    min_size=1,
    max_size=12,
)


@bounded
@given(st.integers(1, 1 << 24), st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 10000))
def test_a_message_of_so_many_bytes_has_them(elements: int, dtype: str, hidden: int) -> None:
    message = message_of_bytes(elements * ITEM_BYTES[dtype], dtype, hidden)
    assert message.num_bytes == elements * ITEM_BYTES[dtype]
    assert len(message.shape) == 2


def test_a_message_of_part_of_an_element_is_refused() -> None:
    with pytest.raises(ValueError, match="whole elements"):
        message_of_bytes(7, "bfloat16", 8)


@bounded
@given(TIMES, SIZES)
def test_the_table_names_the_fastest_at_every_measured_size(
    times: Mapping[int, Mapping[str, float]], between: int
) -> None:
    table = tables.build_table({"bfloat16": times}, 2, "test")
    for size, measured in times.items():
        ranking = table.ranking(size, "bfloat16")
        assert set(ranking) == set(measured)
        fastest = min(measured.values())
        assert measured[ranking[0]] / fastest - 1 <= tables.MIN_GAIN + 1e-9
    assert (table.ranking(between, "bfloat16") == ()) == (between > max(times))


@bounded
@given(
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 30),
    *[st.lists(st.floats(0.1, 1e3), min_size=2, max_size=2)] * 2,
)
def test_a_crossover_lies_between_its_sizes(
    low: int, more: int, incumbent: list[float], rival: list[float]
) -> None:
    assert low <= tables.crossover(low, low + more, incumbent, rival) < low + more


def test_lines_that_cross_in_the_middle_do_so_at_the_geometric_mean() -> None:
    for half in (10, 0.5):  # microseconds
        found = tables.crossover(1024, 4096, (10, 20 + half), (10 + half, 20))
        assert found == pytest.approx(2048, abs=1)


def test_a_sample_counts_as_its_slowest_rank() -> None:
    assert tables.median_of_slowest([[1, 9, 2], [4, 3, 2]]) == 4
    with pytest.raises(ValueError, match="at least one"):
        tables.median_of_slowest([[], []])
    with pytest.raises(ValueError, match="shorter"):
        tables.median_of_slowest([[1, 9], [4]])


def test_noise_does_not_change_the_winner() -> None:
    times = {1024: {"custom": 10.0, "nccl": 20.0}, 2048: {"custom": 10.1, "nccl": 10.0}}
    assert [row.ranking[0] for row in tables.build_rows(times)] == ["custom"]


def test_a_backend_with_a_bound_serves_up_to_it() -> None:
    times = {1024: {"custom": 1.0, "nccl": 2.0}, 4096: {"nccl": 3.0}}
    assert tables.build_rows(times) == (Row(4095, ("custom", "nccl")), Row(4096, ("nccl",)))


@bounded
@given(TIMES)
def test_a_table_survives_its_file(times: Mapping[int, Mapping[str, float]]) -> None:
    rows = tables.build_table({"bfloat16": times, "float32": times}, 4, "").rows
    table = Table(4, rows, "test", rows)
    assert tables.decode(msgspec.json.encode(table)) == table


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"world_size": 2, "rows": {}, "origin": ""}'.replace(b"}", b', "more": 1}'),
        b'{"world_size":2,"origin":"","rows":{"x":[{"max_bytes":1,"ranking":["a"],"b":1}]}}',
        b'{"world_size": 2, "rows": {}, "origin": "", "schema": 99}',
        b'{"world_size": 2, "rows": {"bfloat16": [{"max_bytes": 8, "ranking": []}]}, "origin": ""}',
        b'{"world_size": 2, "origin": "", "rows": {"x": [{"max_bytes": 0, "ranking": ["a"]}]}}',
    ],
)
def test_what_is_no_table_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        tables.decode(text)


def test_a_table_says_how_far_a_backend_leads() -> None:
    rows = (Row(8, ("a", "b")), Row(16, ("b", "a")), Row(24, ("a",)), Row(32, ("c", "a")))
    table = Table(2, {"float16": rows}, "")
    assert table.leads_up_to("float16", "a") == 24
    assert table.leads_up_to("float16", "d") == table.leads_up_to("float32", "a") == 0


def test_a_table_is_described_by_who_comes_first_up_to_which_size() -> None:
    rows = (Row(100, ("a", "b")), Row(1 << 10, ("a", "c")), Row(7680 << 10, ("b", "a")))
    (line,) = tables.describe(Table(2, {"float16": rows}, "here"))
    then = "then vLLM's default dispatch (here)"
    assert line == f"float16: a up to 1 KiB, b up to 7.5 MiB, {then}"
    assert tables.size_text(1023) == "1023 B"


class TestOfOurs:
    """What takes part where nobody has asked for it."""

    ROWS = (Row(64, ("nccl", "push")), Row(128, ("push", "nccl")), Row(256, ("nccl",)))
    FUSED = (Row(1 << 16, (limits.UNFUSED,)), Row(1 << 24, (limits.FUSED_PUSH, limits.UNFUSED)))

    def test_only_ranges_that_ours_leads_are_left(self) -> None:
        ours = Table(2, {"float16": self.ROWS, "float32": self.ROWS}, "here").of_ours("float16")
        assert set(ours.rows) == {"float16"}
        found = [ours.ranking(size, "float16")[0] for size in (64, 65, 128, 129, 256)]
        assert found == [limits.VLLM, limits.PUSH, limits.PUSH, limits.VLLM, limits.VLLM]

    def test_with_residual_and_norm_where_ours_leads(self) -> None:
        ours = Table(2, {}, "here", {"float16": self.FUSED}).of_ours("float16")
        assert ours is not None
        edge = 1 << 16
        first = [ours.fused_ranking(size, "float16")[0] for size in (1, edge, edge + 1)]
        assert first == [limits.UNFUSED, limits.UNFUSED, limits.FUSED_PUSH]
        policy = FusedPolicy(ours, throughout=True)
        assert policy.changes("float16") == [edge]
        assert not policy.is_led("float16", 1, 1 << 24)
        assert policy.is_led("float16", edge + 1, 1 << 30)
        assert FusedPolicy(ours).changes("float16") == []  # one that takes a graph for a part of it

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_nothing_is_left_where_ours_never_leads(self, dtype: str) -> None:
        rows = {"float32": (Row(64, ("nccl", "push")),)}
        fused = {"float32": (Row(1 << 30, (limits.UNFUSED, limits.FUSED_PUSH)),)}
        assert Table(2, rows, "here", fused).of_ours(dtype) is None


class TestFusedPolicy:
    """One launch is fastest from 101 to 200 bytes alone."""

    ROWS = (
        Row(100, (limits.UNFUSED,)),
        Row(200, (limits.FUSED_PUSH, limits.UNFUSED)),
        Row(300, (limits.FUSED_FLASHINFER, limits.FUSED_PUSH)),
        Row(400, (limits.UNFUSED,)),
    )
    TABLE = Table(2, {}, "a test", fused={"float16": ROWS})

    @pytest.mark.parametrize(
        ("low", "high", "led"),
        [
            (1, 50, False),
            (1, 100, False),
            (1, 101, True),
            (101, 101, True),
            (200, 400, True),
            (201, 400, False),  # where FlashInfer's comes first, vLLM's own pass is to put it
            (250, 260, False),
            (401, 1 << 40, False),
        ],
    )
    def test_it_leads_where_some_size_of_the_range_has_it_first(
        self, low: int, high: int, led: bool
    ) -> None:
        assert FusedPolicy(self.TABLE).is_led("float16", low, high) == led
        assert not FusedPolicy(self.TABLE).is_led("float32", low, high)
        assert FusedPolicy(self.TABLE, limits.PUSH).is_led("float32", low, high)
        assert not FusedPolicy(self.TABLE, limits.NCCL).is_led("float16", low, high)

    def test_a_forced_backend_is_followed_and_the_unknown_is_not_fused(self) -> None:
        assert FusedPolicy(self.TABLE).ranking(150, "float16") == (
            limits.FUSED_PUSH,
            limits.UNFUSED,
        )
        assert FusedPolicy(self.TABLE).ranking(150, "bfloat16") == ()
        assert FusedPolicy(None).ranking(150, "float16") == ()
        assert FusedPolicy(self.TABLE).ranking(1 << 40, "float16") == (limits.UNFUSED,)
        for size in (50, 150):
            forced = FusedPolicy(self.TABLE, limits.PUSH)
            assert forced.ranking(size, "float16") == (limits.FUSED_PUSH,)
            assert FusedPolicy(self.TABLE, limits.NCCL).ranking(size, "float16") == ()

    def test_policies_that_choose_alike_are_one(self) -> None:
        policy = FusedPolicy(self.TABLE)
        ways = [FusedPolicy(None), FusedPolicy(self.TABLE, limits.PUSH), FusedPolicy(self.TABLE)]
        assert [way.identity() == policy.identity() for way in ways] == [False, False, True]

    def test_graphs_are_cut_where_one_launch_begins_or_ends_to_come_first(self) -> None:
        assert FusedPolicy(self.TABLE, throughout=True).changes("float16") == [100, 200]
        assert FusedPolicy(self.TABLE).changes("float16") == []
        narrow = tuple(
            Row(100 + place, (limits.FUSED_PUSH if place == 1 else limits.UNFUSED,))
            for place in range(3)
        )
        table = Table(2, {}, "a test", fused={"float16": narrow})
        assert FusedPolicy(table, throughout=True).changes("float16") == [100, 101]

    def test_the_largest_size_at_which_a_launch_comes_first(self) -> None:
        assert {name: self.TABLE.leads_fused(name) for name in (*limits.FUSED, "nobody")} == {
            limits.FUSED_PUSH: 200,
            limits.FUSED_FLASHINFER: 300,
            limits.UNFUSED: 400,
            "nobody": 0,
        }


@pytest.mark.parametrize(
    ("gpu", "world_size"),
    [
        *(("NVIDIA H200", 3), ("NVIDIA H200 NVL", 2)),
        *(("NVIDIA H100", 2), ("NVIDIA H100 80GB HBM3", 4)),
    ],
)
def test_nothing_is_built_in_for_what_was_not_measured(gpu: str, world_size: int) -> None:
    assert cache.builtin_table(gpu, world_size) is None


def test_a_built_in_table_serves_by_itself_only_where_engines_gained() -> None:
    for gpu in (cache.H100, cache.H200):
        machine = with_other(gpu=gpu)
        assert cache.find_table(machine, 2) == cache.builtin_table(gpu, 2) is not None
        found = cache.find_table(machine, 2, in_engines=True)
        assert (found is not None) == ((gpu, 2) in cache.IN_ENGINES)


class TestPeerAccess:
    """Without it, by the driver's word or the user's, no table serves."""

    @pytest.mark.parametrize(
        ("environ", "refused"),
        [
            ({}, False),
            ({"NCCL_P2P_DISABLE": "0"}, False),
            ({"NCCL_P2P_DISABLE": "1"}, True),
            ({"NCCL_P2P_LEVEL": "loc"}, True),
            ({"NCCL_P2P_LEVEL": "0"}, True),
            ({"NCCL_P2P_LEVEL": "SYS"}, False),
        ],
    )
    def test_the_user_may_refuse_it(self, environ: dict[str, str], refused: bool) -> None:
        assert machines.have_access(torch.device("cpu"), environ) is not refused

    @pytest.mark.parametrize("without", [None, (0, 1), (2, 0)])
    def test_every_pair_counts(
        self, without: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair != without)
        assert machines.have_access(torch.device("cuda", 0), {}) is (without is None)

    def test_neither_a_built_in_nor_a_measured_table_serves(self) -> None:
        without = with_other(link=machines.NO_ACCESS)
        cache.save(without, TestCache.table)
        assert cache.find_table(MACHINE, 2) is not None
        assert cache.find_table(without, 2) is None

    def test_a_machine_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = type("Properties", (), {"name": "a GPU", "uuid": "u"})()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
        monkeypatch.setattr(machines, "_driver_and_link", lambda _: ("1", "NV18"))
        device = torch.device("cuda", 0)
        assert machines.read_machine(device).link == "NV18"
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        assert machines.read_machine(device).link == machines.NO_ACCESS


class TestCache:
    table = Table(2, {"bfloat16": (Row(64, ("nccl",)),)}, "measured")

    @pytest.mark.parametrize("fact", ["gpu", "link", "kernels"])
    def test_another_machine_kernel_or_world_size_finds_nothing(self, fact: str) -> None:
        here, other = cache.save(MACHINE, self.table), with_other(**{fact: "other"})
        assert cache.load(MACHINE, 4) is cache.load(other, 2) is None
        elsewhere = cache.path_of(other, 2)
        assert elsewhere not in (None, here)
        elsewhere.write_bytes(here.read_bytes())
        assert cache.load(other, 2) is None

    @pytest.mark.parametrize(
        "changes",
        [{"vllm": "0.33.0"}, {"torch": "2.14.0"}, {"driver": "581"}, {"flashinfer": "0.7.2.post1"}],
        ids=str,
    )
    def test_it_outlives_an_upgrade_and_says_what_it_was_measured_with(
        self, changes: dict[str, str]
    ) -> None:
        rows = (Row(64, (limits.FLASHINFER_ONE_SHOT, limits.PUSH)),)
        cache.save(MACHINE, Table(2, {"bfloat16": rows}, "measured"))
        found = cache.load(with_other(**changes), 2)
        (name,) = changes
        assert found is not None
        assert found.rows == {"bfloat16": rows}
        assert found.origin == f"measured, with {name} {getattr(MACHINE, name)}"

    @pytest.mark.parametrize(
        ("changes", "left", "fused"),
        [
            ({"flashinfer": "0.8.0"}, [(limits.NCCL,), (limits.VLLM,)], (limits.UNFUSED,)),
            ({"nccl": "2.29.1"}, [(limits.FLASHINFER_ONE_SHOT,)] * 2, (limits.FUSED_FLASHINFER,)),
        ],
    )
    def test_columns_of_another_minor_release_of_their_library_are_void(
        self, changes: dict[str, str], left: list[tuple[str, ...]], fused: tuple[str, ...]
    ) -> None:
        rows = (
            Row(64, (limits.FLASHINFER_ONE_SHOT, limits.NCCL)),
            Row(128, (limits.FLASHINFER_ONE_SHOT,)),
        )
        whole = {"bfloat16": (Row(64, (limits.FUSED_FLASHINFER,)),)}
        cache.save(MACHINE, Table(2, {"bfloat16": rows}, "", whole))
        found = cache.load(with_other(**changes), 2)
        assert found is not None
        assert [row.ranking for row in found.rows["bfloat16"]] == left
        assert [row.ranking for row in found.fused["bfloat16"]] == [fused]

    def test_rows_of_each_length_have_a_table_of_their_own(self, tmp_path: Path) -> None:
        long = Table(2, {"bfloat16": (Row(64, ("push",)),)}, "measured")
        assert cache.load(MACHINE, 2, 4096) is None
        paths = cache.save(MACHINE, self.table, 4096), cache.save(MACHINE, long, 8192)
        assert cache.load(MACHINE, 2, 4096) == self.table
        assert cache.load(MACHINE, 2, 8192) == long
        assert cache.load(MACHINE, 2, 5120) is None
        renamed = cache.path_of(MACHINE, 2, 5120)
        assert renamed is not None
        renamed.write_bytes(paths[0].read_bytes())
        assert cache.load(MACHINE, 2, 5120) is None
        renamed.unlink()
        assert paths[0].is_relative_to(tmp_path)
        assert set(paths[0].parent.iterdir()) == set(paths)

    def test_another_dtype_joins_what_was_measured_before(self) -> None:
        half = Table(2, {"float16": (Row(32, ("push",)),)}, "measured later")
        cache.save(MACHINE, self.table)
        cache.save(MACHINE, half)
        found = cache.load(MACHINE, 2)
        assert found == Table(2, {**self.table.rows, **half.rows}, "measured later")

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"machine": 1, "table": {}}'])
    def test_a_damaged_file_is_none(self, content: bytes) -> None:
        cache.save(MACHINE, self.table).write_bytes(content)
        assert cache.load(MACHINE, 2) is None

    @pytest.mark.usefixtures("no_home")
    def test_without_a_home_there_is_none_and_no_error(self) -> None:
        assert cache.load(MACHINE, 2) is None
        with pytest.raises(OSError, match="set HOME or XDG_CACHE_HOME"):
            cache.save(MACHINE, self.table)
