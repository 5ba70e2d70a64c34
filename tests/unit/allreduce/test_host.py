"""The all-reduce through host memory without a GPU: layout, compilation, who is asked."""

import ctypes
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.crossed import crossed
from vllm_commext.allreduce import creation, names
from vllm_commext.allreduce.backends import host
from vllm_commext.allreduce.backends.host import (
    CHUNK_PACKS,
    CHUNKS,
    FLAG_PARCELS,
    HALVES,
    ONE_SHOT,
    SHARE,
    UNIT_PACKS,
    UNIT_PARCELS,
    HostLayout,
)
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.allreduce.table import cache, machine
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine
from vllm_commext.gpu import host_memory
from vllm_commext.gpu.facts import Facts
from vllm_commext.gpu.host_memory import Segment
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP
from vllm_commext.gpu.nvrtc import Program

ARCHITECTURES = (80, 89, 90, 100, 120)
GROUPS = list(product((2, 4, 8), ELEMENT_CODES))
MOST_THREADS = 1024


def parcels(layout: HostLayout, num_packs: int) -> list[int]:
    """Where in a half of an outbox a small message's parcels stand, as the kernel says."""
    return list(range(-(-num_packs // UNIT_PACKS) * UNIT_PARCELS))


def flags_and_data(layout: HostLayout, rank: int, num_packs: int) -> tuple[list[int], list[int]]:
    """The same of a large one: flags, and the packs of chunks and of sums."""
    ranks, chunks = layout.world_size, range(-(-num_packs // CHUNK_PACKS))
    owned = [c for c in chunks if ranks > 2 and c % ranks == rank]
    sent = [c for c in chunks if c not in owned]
    flags = [*sent, *(layout.max_chunks + c // ranks for c in owned)]
    starts = [layout.first_message + c * CHUNK_PACKS for c in sent]
    starts += [layout.first_sum + c // ranks * CHUNK_PACKS for c in owned]
    return (
        [layout.first_flag + flag * FLAG_PARCELS for flag in flags],
        [start + pack for start in starts for pack in range(CHUNK_PACKS)],
    )


@given(st.integers(2, 8), st.integers(1, 1 << 21), st.integers(1, 1 << 21), st.data())
def test_everything_has_its_own_place(
    world_size: int, max_bytes: int, num_bytes: int, data: st.DataObject
) -> None:
    layout = HostLayout(world_size, max_bytes)
    rank = data.draw(st.integers(0, world_size - 1))
    num_packs = -(-min(num_bytes, max_bytes) // PACK_BYTES)
    assert layout.max_packs >= num_packs
    if layout.kernel(num_packs) == ONE_SHOT:
        found = parcels(layout, num_packs)
        assert len(found) * 7 >= num_packs * 8
        assert max(found) < layout.first_flag
    else:
        flags, packs = flags_and_data(layout, rank, num_packs)
        assert len(set(flags)) == len(flags)
        assert min(flags) >= layout.first_flag
        assert max(flags) + FLAG_PARCELS <= layout.first_message
        assert len(set(packs)) == len(packs) >= num_packs
        assert min(packs) >= layout.first_message
        assert max(packs) < layout.half_packs
    assert layout.num_bytes == HALVES * layout.half_packs * PACK_BYTES
    assert layout.first_sum == layout.first_message + layout.max_chunks * CHUNK_PACKS


@given(st.integers(2, 8), st.integers(1, 1 << 20), st.integers(1, 1000))
def test_blocks_share_all_chunks_and_none_is_idle(
    world_size: int, num_packs: int, most: int
) -> None:
    """An idle block could give numbers to parcels that a peer still reads; see `end_call`."""
    layout = HostLayout(world_size, 16 << 20)
    for kernel in layout.kernels:
        blocks = layout.num_blocks(kernel, num_packs, most)
        packs = SHARE * UNIT_PACKS
        if kernel == CHUNKS:
            packs = CHUNK_PACKS * (1 if world_size == 2 else world_size)
        assert 1 <= blocks <= most
        assert num_packs > (blocks - 1) * packs
        if kernel == ONE_SHOT:
            assert blocks == most or blocks * packs >= num_packs


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_group_changes_its_kernel_once_as_messages_grow(world_size: int) -> None:
    layout = HostLayout(world_size, 8 << 20)
    chosen = [layout.kernel(packs) for packs in range(1, layout.max_packs, 999)]
    changes = [(a, b) for a, b in pairwise(chosen) if a != b]
    assert changes == [(ONE_SHOT, CHUNKS)]
    assert set(chosen) == set(layout.kernels)
    for kernel in layout.kernels:
        assert layout.threads(kernel) % WARP == 0
        assert layout.threads(kernel) <= MOST_THREADS
    assert HALVES * HostLayout(world_size, host.MAX_MESSAGE_BYTES).half_packs < 2**32


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(("group", "architecture"), crossed(GROUPS, ARCHITECTURES), ids=str)
def test_it_compiles_for_every_architecture(group: tuple[int, str], architecture: int) -> None:
    world_size, dtype = group
    layout = HostLayout(world_size, 1 << 20)
    for kernel in layout.kernels:
        macros = layout.macros(kernel, ELEMENT_CODES[dtype], rank=1)
        cubin = Program(kernel).compile_cubin(macros, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert kernel.encode() in cubin


class TestWhoIsAsked:
    """Nothing changes where GPUs reach each other; where not, only what needs no peer access."""

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
    def test_the_user_may_refuse_peer_access(self, environ: dict[str, str], refused: bool) -> None:
        assert machine.is_refused(environ) is refused
        assert machine.have_access(torch.device("cpu"), environ) is not refused

    @pytest.mark.parametrize("without", [None, (0, 1), (2, 0)])
    def test_every_pair_counts(
        self, without: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair != without)
        assert machine.have_access(torch.device("cuda", 0), {}) is (without is None)

    def test_backends(self) -> None:
        assert names.HOST not in machine.measurable(True)
        assert {names.HOST, *machine.measurable(True)} == set(names.BACKENDS)
        assert machine.measurable(False) == (names.HOST, names.NCCL)

    @pytest.mark.parametrize(
        ("forced", "only"), [(None, "push"), ("host", "host"), ("push", "push")]
    )
    def test_one_order_of_sums_may_be_this_ones(self, forced: str | None, only: str) -> None:
        required = creation.Requirements(forced, facts=Facts(invariant=True))
        assert required.only == only
        assert creation.why_none(required) == ""
        assert "for which nccl is none" in creation.why_none(
            creation.Requirements("nccl", facts=Facts(invariant=True))
        )

    def test_no_table_of_machines_with_peer_access_serves_without(self) -> None:
        known = Machine("NVIDIA H200", "NV18", "", "", "", "", "")
        without = Machine("NVIDIA H200", NO_ACCESS, "", "", "", "", "")
        assert cache.find_table(known, 2, use_cache=False) is not None
        assert cache.find_table(without, 2, use_cache=False) is None

    def test_a_machine_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = type("Properties", (), {"name": "a GPU", "uuid": "u"})()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
        monkeypatch.setattr(machine, "_driver_and_link", lambda _: ("1", "NV18"))
        device = torch.device("cuda", 0)
        assert machine.read_machine(device).link == "NV18"
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        assert machine.read_machine(device).link == NO_ACCESS


class TestHostMemory:
    """Where its pages are, and what a process finds of another's."""

    @pytest.mark.parametrize(
        ("text", "cpus"),
        [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set[int]()), ("0,2-3", {0, 2, 3})],
    )
    def test_lists_of_cpus(self, text: str, cpus: set[int]) -> None:
        assert host_memory.parse_cpus(text) == cpus

    def test_cpus_of_a_gpus_node(self, tmp_path: Path) -> None:
        for bus_id, node in (("0000:1b:00.0", "1"), ("0000:2b:00.0", "-1")):
            (tmp_path / bus_id).mkdir()
            (tmp_path / bus_id / "numa_node").write_text(f"{node}\n")
        (tmp_path / "node1").mkdir()
        (tmp_path / "node1" / "cpulist").write_text("4-5\n")

        def near(bus_id: str) -> set[int]:
            return host_memory.cpus_near(bus_id, tmp_path, tmp_path)

        assert near("0000:1B:00.0") == {4, 5}
        assert near("0000:2B:00.0") == near("0000:3B:00.0") == set()

    def test_a_thread_goes_back_to_its_cpus(self) -> None:
        import os

        before = os.sched_getaffinity(0)
        for wanted in ({min(before)}, {10**4}, set[int]()):
            with host_memory.running_on(wanted):
                now = os.sched_getaffinity(0)
                assert now == (wanted & before or before)
            assert os.sched_getaffinity(0) == before

    def test_another_file_or_host_is_refused(self) -> None:
        segment, other = (Segment.create(host_memory.NAME, 8192) for _ in range(2))
        offer = segment.offer
        try:
            with pytest.raises(host_memory.UnsupportedError, match="on one host"):
                Segment.open(offer._replace(host="another"))
            moved = offer._replace(descriptor=other.offer.descriptor)
            with pytest.raises(host_memory.UnsupportedError, match="got another file"):
                Segment.open(moved)
            with pytest.raises(host_memory.UnsupportedError, match="one user and one process"):
                Segment.open(offer._replace(descriptor=10**6))
            opened = Segment.open(offer)
            segment.fill(0xFF, 16, set())
            assert ctypes.string_at(opened.address, 17) == b"\xff" * 16 + b"\0"
            opened.close()
        finally:
            for made in (segment, other):
                made.close()
                made.close()

    def test_what_cuda_refuses_is_told_and_what_is_mapped_is_unmapped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []

        class Runtime:
            cudaHostRegisterMapped, cudaHostRegisterPortable = 2, 1

            def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int]:
                calls.append(f"register {num_bytes} {flags}")
                return (0,)

            def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
                return 1, 0

            def cudaHostUnregister(self, address: int) -> tuple[int]:
                calls.append("unregister")
                return (0,)

        runtime: Any = Runtime()
        monkeypatch.setattr(host_memory, "cuda_runtime", lambda: runtime)
        segment = Segment.create(host_memory.NAME, 4096)
        with pytest.raises(host_memory.UnsupportedError, match="mapping host memory"):
            segment.register()
        segment.close()
        assert calls == ["register 4096 3", "unregister"]
