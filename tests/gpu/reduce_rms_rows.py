"""What the reduce-RMS checks on GPUs compare: rows of all ranks, and their norms in float64."""

from typing import Any

import torch

from vllm_commext.collective import Collective
from vllm_commext.reduce_rms import ops as _ops  # noqa: F401 - registers the ops
from vllm_commext.reduce_rms.kernel import slot_bytes
from vllm_commext.reduce_rms.workspace import LamportWorkspace

EPS = 1e-6
# One unit in the last place of numbers from 1 to 2.
PLACE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
qk_rms_norm = torch.ops.vllm_commext.qk_rms_norm


class Rows:
    """Rows of all ranks, the same numbers on every rank; `qkv`: this rank's, [tokens, q + 2 * kv];
    `q_want`, `k_want`: the RMSNorm over all ranks in float64."""

    def __init__(
        self, seed: int, tokens: int, q: int, kv: int, dtype: torch.dtype, rank: int, world: int
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        # Rows of different magnitudes: another row's sums would not go unnoticed.
        scales = [torch.rand(tokens, 1, generator=generator, device="cuda") for _ in range(world)]
        self.all = [(normal(tokens, q + 2 * kv) * (0.2 + 4 * s)).to(dtype) for s in scales]
        weights = [(normal(q).to(dtype), normal(kv).to(dtype)) for _ in range(world)]
        self.qkv, (self.q_weight, self.k_weight) = self.all[rank], weights[rank]
        self.q, self.kv, self.world = q, kv, world
        self.q_want = self._want(0, q, self.q_weight)
        self.k_want = self._want(q, q + kv, self.k_weight)

    def _want(self, start: int, stop: int, weight: torch.Tensor) -> torch.Tensor:
        squares = sum(part[:, start:stop].double().square().sum(-1) for part in self.all)
        mean = squares / (self.world * (stop - start))
        factor = torch.rsqrt(mean + EPS).unsqueeze(-1)
        return self.qkv[:, start:stop].double() * factor * weight.double()


def ulps(out: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of the output's last place."""
    if out.numel() == 0:
        return 0.0
    exponent = torch.frexp(want).exponent - 1
    smallest = {torch.bfloat16: -126, torch.float32: -126, torch.float16: -14}[out.dtype]
    place = torch.ldexp(
        torch.full_like(want, PLACE[out.dtype]), exponent.clamp_min(smallest).to(torch.int32)
    )
    return float(((out.double() - want).abs() / place).max())


class Rank:
    """A check's rank, and how it makes workspaces; `collective` reports for `run_checks`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.collective = rank, world, Collective.over(None)

    def workspace(self, seconds: float = 10.0, **options: Any) -> LamportWorkspace:
        size = slot_bytes(16384, self.world)
        return LamportWorkspace(self.rank, self.world, size, timeout_seconds=seconds, **options)

    def minimax(self, seed: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
        q, kv = 6144 // self.world, 1024 // self.world
        return Rows(seed, tokens, q // 8 * 8, kv // 8 * 8, dtype, self.rank, self.world)

    def call(self, rows: Rows, handle: int) -> tuple[torch.Tensor, torch.Tensor]:
        return qk_rms_norm(rows.qkv, rows.q_weight, rows.k_weight, handle, EPS)


def settle(workspace: LamportWorkspace) -> None:
    torch.cuda.synchronize()
    workspace.raise_if_failed()
