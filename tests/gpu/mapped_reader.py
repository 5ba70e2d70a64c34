"""Reads of other processes' GPU memory through mappings; test_mapped_reads.py starts it.

    python tests/gpu/mapped_reader.py 0 1 0 [CHECK ...]

Prefill workers are processes of their own on the first GPU, the reader is on the last one, which
may be the same.  It prints a line of JSON a check: its name, the seconds it took, figures, errors.
"""

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from tests.kit.descriptors import expand_rows, one_plane
from tests.kit.gpu_ranks import checks_of, run_checks
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.config import AUTO, ConnectorConfig
from vllm_commext.nixl.geometry.layout import FULL, CacheLayout, Family, Group
from vllm_commext.nixl.geometry.plan import Blocks, ReadPlan, plan_read
from vllm_commext.nixl.mapped import Mapped, MappedReader, Mapper, place_of_process
from vllm_commext.nixl.transport.gather import CudaDevice
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire.description import MappedOffer

SERVE = "serve"
BOUND_SECONDS = 20.0
BLOCK_TOKENS = 16
NUM_HEADS = 8
Figures = dict[str, Any]
Bytes = torch.Tensor


class Reader(Mapper):
    """The one rank that reads."""

    collective = Collective(0, 1, lambda mine: [mine])


def pattern(num_bytes: int, seed: int) -> Bytes:
    parts: list[Bytes] = []
    for begin in range(0, num_bytes, 1 << 24):
        place = torch.arange(begin, min(begin + (1 << 24), num_bytes), device="cuda")
        parts.append(((place + seed * 7919) * 2654435761 >> 11 & 255).to(torch.uint8))
    return torch.cat(parts)


def serve(gpu: int, seed: int, num_bytes: int) -> None:
    """A prefill worker: says what it offers, and is there until its input ends."""
    torch.cuda.set_device(gpu)
    memory = pattern(num_bytes, seed)
    torch.cuda.synchronize()
    mapped = Mapped(ConnectorConfig("127.0.0.1", 1, mapped_reads=AUTO))
    address = memory.data_ptr()
    mapped.prepare([(address, num_bytes)], is_on_gpu=True)
    encoded = msgspec.msgpack.encode(mapped.offer).hex()
    sys.stdout.write(f"offer {encoded} {address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


class Source:
    def __init__(self, seed: int, num_bytes: int) -> None:
        self.seed, self.num_bytes = seed, num_bytes
        command = [sys.executable, __file__, SERVE, "0", str(seed), str(num_bytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("offer ")), "")
        assert line, "the prefill worker has ended"
        _, encoded, address = line.split()
        self.address = int(address)
        self.offer = msgspec.msgpack.decode(bytes.fromhex(encoded), type=MappedOffer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_SECONDS)


def layout_of(
    address: int,
    num_blocks: int,
    *,
    num_layers: int,
    token_bytes: int,
    tp_size: int = 1,
    tp_rank: int = 0,
    by_token: bool = False,
) -> CacheLayout:
    held = NUM_HEADS // tp_size
    layer_bytes = held * BLOCK_TOKENS * token_bytes
    geometry = one_plane(
        *(num_blocks, num_layers * layer_bytes, BLOCK_TOKENS, NUM_HEADS),
        token_bytes if by_token else BLOCK_TOKENS * token_bytes,
        token_bytes,
        token_stride=held * token_bytes if by_token else token_bytes,
    )
    names = [f"layer{number:03}" for number in range(num_layers)]
    addresses = [address + number * layer_bytes for number in range(num_layers)]
    return CacheLayout(
        tp_size=tp_size,
        tp_rank=tp_rank,
        num_blocks=num_blocks,
        groups=[Group(FULL, BLOCK_TOKENS)],
        families=[Family(0, names, addresses, geometry)],
    )


class Case:
    """A reader of all blocks of one or several workers, in another order."""

    def __init__(
        self, num_blocks: int, *, tp_size: int = 1, by_token: bool = False, **shape: int
    ) -> None:
        self.num_blocks = num_blocks
        total = num_blocks * shape["num_layers"] * shape["token_bytes"] * NUM_HEADS * BLOCK_TOKENS
        self.memory = pattern(total, 99)
        self.sources = [Source(seed, total // tp_size) for seed in range(tp_size)]
        local = layout_of(self.memory.data_ptr(), num_blocks, **shape)
        self.plans: list[ReadPlan] = []
        for rank, source in enumerate(self.sources):
            sizes = {"tp_size": tp_size, "tp_rank": rank, "by_token": by_token}
            remote = layout_of(source.address, num_blocks, **shape, **sizes)
            self.plans.append(plan_read(local, remote, local_device=0, remote_device=0))
        dice = np.random.default_rng(0)
        own, theirs = (dice.permutation(num_blocks).tolist() for _ in range(2))
        blocks = [Blocks(0, own[: num_blocks - 3])]
        num_tokens = (num_blocks - 3) * BLOCK_TOKENS
        self.pairs = [
            plan.pairs(
                blocks,
                [theirs[: num_blocks - 3]],
                num_tokens=num_tokens,
                num_remote_tokens=num_tokens,
            )
            for plan in self.plans
        ]

    def expected(self) -> Any:
        torch.cuda.synchronize()
        after = self.memory.cpu().numpy().copy()
        base = self.memory.data_ptr()
        for source, plan, pairs in zip(self.sources, self.plans, self.pairs, strict=True):
            held = pattern(source.num_bytes, source.seed).cpu().numpy()
            own, theirs = expand_rows(plan.local_rows), expand_rows(plan.remote_rows)
            for a, b in zip(pairs.local.tolist(), pairs.remote.tolist(), strict=True):
                size, to = int(own[a, 1]), int(own[a, 0]) - base
                begin = int(theirs[b, 0]) - source.address
                after[to : to + size] = held[begin : begin + size]
        return after

    def open(self, mapper: Mapper) -> list[MappedReader]:
        return [
            mapper.open(source.offer, plan)
            for source, plan in zip(self.sources, self.plans, strict=True)
        ]

    def end(self) -> None:
        for source in self.sources:
            source.kill()


def wait(postings: Iterable[Posting], bound: float = BOUND_SECONDS) -> list[str]:
    end, found = time.monotonic() + bound, list[str]()
    for posting in postings:
        while (said := posting.look()) is None:
            assert time.monotonic() < end, f"a read has not ended within {bound:g} s"
            time.sleep(20e-6)
        found.append(said)
    return found


def read_all(mapper: Mapper, case: Case) -> Figures:
    """Read everything twice, compare every byte, and close the mappings."""
    before = case.memory.clone()
    readers = case.open(mapper)
    expected = case.expected()
    seconds = 0.0
    for _ in range(2):
        case.memory.copy_(before)
        torch.cuda.synchronize()
        started = time.perf_counter()
        postings = [reader.post(pairs) for reader, pairs in zip(readers, case.pairs, strict=True)]
        assert wait(postings) == [""] * len(readers)
        seconds = time.perf_counter() - started
        found = case.memory.cpu().numpy()
        assert np.array_equal(found, expected), f"{(found != expected).sum()} bytes are wrong"
    for reader in readers:
        reader.close()
    num_bytes = sum(pairs.num_bytes for pairs in case.pairs)
    pieces = sum(len(pairs.local) for pairs in case.pairs)
    return {"pieces": pieces, "ms": seconds * 1e3, "gb_s": num_bytes / seconds / 1e9}


def checked(mapper: Mapper, *args: Any, **shape: Any) -> Figures:
    case = Case(*args, **shape)
    try:
        return read_all(mapper, case)
    finally:
        case.end()


def check_equal(mapper: Mapper) -> Figures:
    """Blocks of 2 MiB."""
    return checked(mapper, 128, num_layers=32, token_bytes=512)


def check_split(mapper: Mapper) -> Figures:
    """Half of the heads from each of two workers: pieces of 32 KiB."""
    return checked(mapper, 128, tp_size=2, num_layers=32, token_bytes=512)


def check_odd(mapper: Mapper) -> Figures:
    """Token by token and head by head, where nothing is aligned."""
    return checked(mapper, 16, num_layers=3, token_bytes=37, by_token=True)


def check_reopened(mapper: Mapper) -> Figures:
    """Opening and closing leaves nothing behind."""
    case = Case(16, num_layers=4, token_bytes=64)
    try:
        seconds, free = list[float](), list[int]()
        for _ in range(30):
            started = time.perf_counter()
            for reader in case.open(mapper):
                reader.close()
            seconds.append(time.perf_counter() - started)
            free.append(torch.cuda.mem_get_info()[0])
        assert free[0] - free[-1] < 8 << 20
        return {"first_ms": seconds[0] * 1e3, "ms": sorted(seconds)[15] * 1e3}
    finally:
        case.end()


def check_refused(mapper: Mapper) -> Figures:
    """What cannot be mapped says so, and the next one is."""
    case = Case(16, num_layers=4, token_bytes=64)
    offer = case.sources[0].offer
    first = offer.regions[0]
    altered: Sequence[tuple[str, MappedOffer | None]] = (
        ("no offer", None),
        ("host", msgspec.structs.replace(offer, place="another host")),
        ("token", msgspec.structs.replace(offer, token=b"\1" * len(offer.token))),
        (
            "handle",
            msgspec.structs.replace(
                offer, regions=[msgspec.structs.replace(first, handle=b"\7" * 64)]
            ),
        ),
        ("outside", msgspec.structs.replace(offer, regions=[first])),
    )
    said: Figures = {}
    try:
        for name, one in altered:
            try:
                mapper.open(one, case.plans[0])
            except UnsupportedError as error:
                said[name] = str(error)
        assert set(said) == {name for name, _ in altered}, said
        return {**said, **read_all(mapper, case)}
    finally:
        case.end()


def check_captured(_: Mapper) -> Figures:
    """Another thread maps, reads and unmaps while this one captures graphs, as engines do."""
    mapper = Mapper(CudaDevice(), place_of_process())
    case = Case(32, num_layers=4, token_bytes=64)
    errors, num_reads, is_over = list[str](), [0], threading.Event()

    def body() -> None:
        try:
            torch.cuda.set_device(case.memory.device)
            while not is_over.is_set():
                (reader,) = case.open(mapper)
                assert wait([reader.post(case.pairs[0])]) == [""]
                reader.close()
                num_reads[0] += 1
        except Exception:  # noqa: BLE001 the check's own thread is to see it
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=body, daemon=True)
    ones = torch.ones(1024, device="cuda")
    thread.start()
    try:
        for _ in range(10):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = ones
                for _ in range(300):
                    total = total + ones
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(total, ones * 301)
    finally:
        is_over.set()
        thread.join(BOUND_SECONDS)
        case.end()
    assert not errors, errors[0]
    return {"reads": num_reads[0]}


def check_killed(mapper: Mapper) -> Figures:
    """A worker that is killed while it is read: each read ends in time, and its memory is free
    again as soon as the mapping is closed."""
    torch.cuda.empty_cache()
    idle = torch.cuda.mem_get_info(0)[0]
    case = Case(512, num_layers=32, token_bytes=512)
    (reader,) = case.open(mapper)
    (pairs,) = case.pairs
    errors: list[str] = []
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        posting = reader.post(pairs)
        if len(errors) == 20:
            case.sources[0].process.kill()
        errors += wait([posting])
    case.end()
    torch.cuda.empty_cache()
    while_open = torch.cuda.mem_get_info(0)[0]
    reader.close()
    end = time.monotonic() + 10.0
    held = idle - torch.cuda.mem_get_info(0)[0]
    own = case.memory.nbytes if torch.cuda.current_device() == 0 else 0
    while held - own > 256 << 20 and time.monotonic() < end:
        time.sleep(0.2)
        held = idle - torch.cuda.mem_get_info(0)[0]
    figures = {
        "reads": len(errors),
        "errors": sorted(set(errors)),
        "held_while_open_mib": (idle - while_open) >> 20,
        "held_after_close_mib": held >> 20,
    }
    assert held - own <= 256 << 20, figures
    return figures


CHECKS: dict[str, Callable[[Mapper], Figures]] = checks_of(globals())


def main() -> None:
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    run_checks(Reader(CudaDevice(), place_of_process()), CHECKS, sys.argv[4:])
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(*map(int, sys.argv[2:]))
    main()
