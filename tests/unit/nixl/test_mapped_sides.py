"""What a worker has for mapped reads; on machines that have no such thing, a line that says why."""

import logging
from typing import Any

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl import mapped as mapping
from vllm_commext.nixl.config import AUTO, NEVER, ConnectorConfig
from vllm_commext.nixl.mapped import Mapped, place_of_process


class Runtime:
    """CUDA as far as an offer needs it: one allocation of 2 MiB behind the other."""

    def __init__(self, patch: pytest.MonkeyPatch, refused: int = 0) -> None:
        self.allocated, self.content = set[int](), dict[int, bytes]()
        self.refused = refused
        patch.setattr(mapping.ipc, "allocate", self.allocate)
        patch.setattr(mapping.ipc, "write", self.content.__setitem__)
        patch.setattr(mapping.ipc, "free", self.allocated.remove)
        patch.setattr(mapping.ipc, "export_handle", self.export)
        patch.setattr(mapping, "allocation_of", lambda address: (address & -(1 << 21), 1 << 21))

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes == 1 << 21
        self.allocated.add(7 << 21)
        return 7 << 21

    def export(self, address: int) -> bytes:
        if address == self.refused:
            raise UnsupportedError("exporting device memory: CUDA reports no")
        return address.to_bytes(64, "little")


def made(**settings: Any) -> Mapped:
    return Mapped(ConnectorConfig("127.0.0.1", 1, **settings))


@pytest.mark.parametrize(("wanted", "is_on_gpu"), [(AUTO, False), (NEVER, False), (NEVER, True)])
def test_what_is_in_host_memory_or_switched_off_is_neither_offered_nor_maps_others(
    log_lines: pytest.LogCaptureFixture, wanted: str, is_on_gpu: bool
) -> None:
    mapped = made(mapped_reads=wanted)
    mapped.prepare([(4096, 64)], is_on_gpu=is_on_gpu)
    assert mapped.offer is mapped.mapper is None
    assert not [one for one in log_lines.records if one.levelno >= logging.INFO]


def test_a_machine_without_a_gpu_says_so_and_goes_on(
    log_lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> None:
        raise RuntimeError("no CUDA here")

    monkeypatch.setattr(mapping, "CudaDevice", no_gpu)
    monkeypatch.setattr(mapping.ipc, "allocate", lambda _: no_gpu())
    monkeypatch.setattr(mapping.ipc, "forget_error", lambda: None)
    mapped = made(mapped_reads=AUTO)
    mapped.prepare([(4096, 64)], is_on_gpu=True)
    assert mapped.offer is mapped.mapper is None
    first, second = log_lines.messages
    assert "unavailable on this worker: no CUDA here; reads go through NIXL" in first
    assert "others cannot map this worker's cache: no CUDA here" in second


def test_every_allocation_is_offered_once_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    mapped = made(mapped_reads=AUTO)
    monkeypatch.setattr(mapping, "CudaDevice", lambda: None)
    monkeypatch.setattr(mapping, "Mapper", lambda *_: "a mapper")
    base = 1 << 21
    mapped.prepare([(base + 512, 64), (base + 4096, 64), (3 * base, 64)], is_on_gpu=True)
    offer = mapped.offer
    assert offer is not None
    assert mapped.mapper == "a mapper"
    assert offer.place == place_of_process()
    assert [one.address for one in offer.regions] == [7 * base, base, 3 * base]
    assert {one.num_bytes for one in offer.regions} == {base}
    assert [int.from_bytes(one.handle, "little") for one in offer.regions] == [
        one.address for one in offer.regions
    ]
    assert runtime.content == {offer.token_address: offer.token}
    mapped.close()
    mapped.close()
    assert not runtime.allocated


def test_memory_without_handles_is_not_offered_and_the_worker_maps_others_all_the_same(
    log_lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of PyTorch's expandable segments."""
    runtime = Runtime(monkeypatch, refused=1 << 21)
    monkeypatch.setattr(mapping, "CudaDevice", lambda: None)
    monkeypatch.setattr(mapping, "Mapper", lambda *_: "a mapper")
    monkeypatch.setattr(mapping.ipc, "forget_error", lambda: None)
    mapped = made(mapped_reads=AUTO)
    mapped.prepare([(1 << 21, 64)], is_on_gpu=True)
    assert mapped.mapper == "a mapper"
    assert mapped.offer is None
    assert not runtime.allocated
    (line,) = log_lines.messages
    assert "others cannot map this worker's cache: exporting device memory" in line
