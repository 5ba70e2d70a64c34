"""One rank of the reduce-RMS checks on GPUs; test_reduce_rms.py starts one a GPU.

    python -m tests.gpu.reduce_rms_ranks RANK WORLD_SIZE PORT [CHECK ...]

Every rank runs the same checks in the same order and after each tells the others how it went. Rank
0 prints a line of JSON a check: its name, the seconds it took, figures, and each rank's error."""

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from tests.gpu.reduce_rms_rows import EPS, PLACE, Rank, Rows, qk_rms_norm, settle, ulps
from tests.kit.gpu_ranks import checks_of, run_checks
from vllm_commext.errors import CommextTimeoutError, ProtocolError
from vllm_commext.reduce_rms.workspace import LamportWorkspace

Figures = dict[str, Any]


def check_exact(rank: Rank) -> Figures:
    """Types, sizes, token counts; zero tokens; the same bits a second time."""
    with torch.device("cuda"):  # as vLLM has it while it makes a model
        workspace = rank.workspace()
    numbers = random.Random(3)
    sizes = [(6144 // rank.world // 8 * 8, 1024 // rank.world // 8 * 8), (8, 8), (1000, 1000)]
    sizes += [(numbers.randrange(1, 500) * 8, numbers.randrange(1, 200) * 8) for _ in range(3)]
    worst: dict[str, float] = {}
    for index, (q, kv) in enumerate(sizes):
        for dtype in PLACE if index < 4 else (torch.bfloat16,):
            for tokens in (0, 1, 2, 5, 133, 333, 1000) + ((2049, 9000) if index == 0 else ()):
                rows = Rows(index * 100 + tokens, tokens, q, kv, dtype, rank.rank, rank.world)
                outs = rank.call(rows, workspace.handle)
                again = rank.call(rows, workspace.handle)
                assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
                error = max(ulps(outs[0], rows.q_want), ulps(outs[1], rows.k_want))
                worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
                bound = 1 if dtype is not torch.float32 else 16
                assert error <= bound, (q, kv, dtype, tokens, error)
    settle(workspace)
    workspace.cleanup()
    return worst


class Verifier:
    """Compares outputs on the device, with nothing that waits, and counts what is wrong."""

    def __init__(self, rank: Rank, pool: int, max_tokens: int) -> None:
        self.pool = [rank.minimax(1000 + i, max_tokens) for i in range(pool)]
        self.wants = [(rows.q_want.float(), rows.k_want.float()) for rows in self.pool]
        for rows in self.pool:
            del rows.all, rows.q_want, rows.k_want
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def call(self, index: int, tokens: int, handle: int) -> None:
        rows = self.pool[index]
        outs = qk_rms_norm(rows.qkv[:tokens], rows.q_weight, rows.k_weight, handle, EPS)
        for out, want in zip(outs, self.wants[index], strict=True):
            wanted = want[:tokens]
            bad = (out.float() - wanted).abs() > wanted.abs() * 2.0**-7 + 1e-30
            self.wrong += bad.sum() + out.isnan().sum()

    def finish(self, workspace: LamportWorkspace) -> None:
        settle(workspace)
        assert int(self.wrong) == 0, f"{int(self.wrong)} elements are wrong"


def random_tokens(numbers: random.Random) -> int:
    kind = numbers.random()
    if kind < 0.6:
        return numbers.randrange(1, 40)
    return numbers.randrange(40, 600) if kind < 0.97 else numbers.randrange(600, 3000)


def skew(own: random.Random) -> None:
    """Delays that differ between the ranks: on the GPU, now and then on the host."""
    if own.random() < 0.3:
        torch.cuda._sleep(own.randrange(1, 60_000))
    if own.random() < 0.002:
        time.sleep(0.005)


def check_chained_calls(rank: Rank) -> Figures:
    """Nothing between the calls, so that programmatic launches follow upon one another."""
    workspace = rank.workspace()
    rows = rank.minimax(5, 3000)
    together, own = random.Random(2), random.Random(200 + rank.rank)
    wants = rank.call(rows, workspace.handle)
    for _ in range(300):
        skew(own)
        counts = [random_tokens(together) for _ in range(32)]
        outs = [
            (n, *qk_rms_norm(rows.qkv[:n], rows.q_weight, rows.k_weight, workspace.handle, EPS))
            for n in counts
        ]
        for n, q, k in outs:
            for out, want in ((q, wants[0][:n]), (k, wants[1][:n])):
                # Other forms of the kernel add in another order: a last place at most.
                bad = (out.float() - want.float()).abs() > want.float().abs() * 2.0**-6
                assert not bool(bad.any())
    settle(workspace)
    workspace.cleanup()
    return {"calls": 300 * 32}


def check_graphs(rank: Rank) -> Figures:
    workspace = rank.workspace()
    verifier = Verifier(rank, 3, 2200)
    sizes = (1, 7, 64, 300, 1100, 2200)
    for tokens in sizes:
        verifier.call(0, tokens, workspace.handle)
    torch.cuda.synchronize()
    graphs = []
    for i, tokens in enumerate(sizes):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for j in range(3):
                verifier.call((i + j) % 3, tokens, workspace.handle)
        graphs.append(graph)
    together, own = random.Random(4), random.Random(300 + rank.rank)
    weights = [30, 30, 20, 10, 5, 5]
    for _ in range(10_000):
        if own.random() < 0.1:
            skew(own)
        together.choices(graphs, weights)[0].replay()
        if together.random() < 0.1:
            verifier.call(together.randrange(3), random_tokens(together) % 2200, workspace.handle)
    verifier.finish(workspace)
    workspace.cleanup()
    return {"replays": 10_000}


def check_strides(rank: Rank) -> Figures:
    """Rows apart, rows at odd addresses, other weight types."""
    workspace = rank.workspace()
    handle, rows = workspace.handle, rank.minimax(7, 77)
    wide = torch.zeros(77, rows.qkv.shape[1] + 21, dtype=torch.bfloat16, device="cuda")
    error = 0.0
    for offset in (0, 8, 1, 3):
        wide[:, offset : offset + rows.qkv.shape[1]] = rows.qkv
        shifted = wide[:, offset : offset + rows.qkv.shape[1]]
        outs = qk_rms_norm(shifted, rows.q_weight, rows.k_weight, handle, EPS)
        error = max(error, ulps(outs[0], rows.q_want), ulps(outs[1], rows.k_want))
    floats = qk_rms_norm(rows.qkv, rows.q_weight.float(), rows.k_weight.float(), handle, EPS)
    error = max(error, ulps(floats[0], rows.q_want), ulps(floats[1], rows.k_want))
    settle(workspace)
    workspace.cleanup()
    assert error <= 1, error
    return {"ulps": error}


def check_missing_peer(rank: Rank) -> Figures:
    """The last rank does not come: all others hear of it in time, and a new workspace serves."""
    workspace = rank.workspace(seconds=2.0)
    rows = rank.minimax(8, 50)
    rank.call(rows, workspace.handle)
    settle(workspace)
    dist.barrier()
    seconds, text = 0.0, ""
    if rank.rank != rank.world - 1:
        start = time.monotonic()
        for _ in range(5):  # what is queued behind must not wait again, each for itself
            q, _ = rank.call(rows, workspace.handle)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        assert bool(q.isnan().all()), "rows of a failed call are to be NaN"
        try:
            rank.call(rows, workspace.handle)
        except CommextTimeoutError as error:
            text = str(error)
        assert f"rank {rank.world - 1}" in text, text
        assert 1.5 < seconds < 6, seconds
    dist.barrier()
    workspace.cleanup()
    fresh = rank.workspace()
    q, _ = rank.call(rows, fresh.handle)
    settle(fresh)
    error = ulps(q, rows.q_want)
    fresh.cleanup()
    assert error <= 1, error
    return {"seconds": round(seconds, 2), "message": text}


def check_streams(rank: Rank) -> Figures:
    """Two streams with a workspace each run side by side; with one for both they are found out."""
    first, second = rank.workspace(), rank.workspace(seconds=3.0)
    rows = rank.minimax(9, 300)  # few enough that both calls have room on every GPU
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    kept = []
    for _ in range(100):
        for stream, workspace in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                kept.append(rank.call(rows, workspace.handle)[0])
    torch.cuda.synchronize()
    first.raise_if_failed()
    second.raise_if_failed()
    error = max(ulps(q, rows.q_want) for q in (kept[0], kept[1], kept[-1], kept[-2]))
    assert error <= 1, error
    dist.barrier()
    found = "nothing"
    if rank.rank == 0:  # its calls wait for peers that do not come, so the second meets the first
        for stream in streams:
            with torch.cuda.stream(stream):
                qk_rms_norm(rows.qkv[:64], rows.q_weight, rows.k_weight, second.handle, EPS)
        torch.cuda.synchronize()
        try:
            second.raise_if_failed()
        except ProtocolError as problem:
            found = str(problem)
        assert "same time" in found, found
    dist.barrier()
    first.cleanup()
    second.cleanup()
    return {"found": found}


def check_create_and_destroy(rank: Rank) -> Figures:
    rows = rank.minimax(10, 10)
    free = []
    for _ in range(50):
        workspace = rank.workspace()
        rank.call(rows, workspace.handle)
        settle(workspace)
        workspace.cleanup()
        del workspace
        free.append(torch.cuda.mem_get_info()[0])
    grown = free[9] - free[-1]
    assert grown <= 4 << 20, f"{grown} bytes in 40 rounds"
    return {"grown_bytes": grown}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    run_checks(Rank(rank, world), CHECKS, sys.argv[4:])
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
