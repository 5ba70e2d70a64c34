"""Our norm inside the installed vLLM: what is put where, and what its layers then compute."""

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from vllm_commext.testing.ports import free_port

pytest.importorskip("cuda.bindings", reason="vLLM's own norm needs cuda-bindings to be imported")

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = pytest.mark.timeout(600)
TIMEOUT_SECONDS = 250
TOGGLE = "VLLM_COMMEXT_REDUCE_RMS"
NORM = "vllm.model_executor.layers.minimax_rms_norm"
TOKENS, Q, KV, EPS = 5, 64, 16, 1e-6

LOOK = f"""
import importlib, json
from vllm.plugins import load_general_plugins
load_general_plugins()
norm = importlib.import_module("{NORM}.rms_norm_tp")
lamport = importlib.import_module("{NORM}.lamport_workspace")
from vllm.model_executor.models import ModelRegistry
from vllm_commext import status
olmoe = ModelRegistry.models["OlmoeForCausalLM"]
print(json.dumps({{
    "fused": getattr(norm._MINIMAX_FUSED_AR_RMS_QK, "__module__", None),
    "workspace": lamport.get_allreduce_workspace.__module__,
    "bound": norm.MINIMAX_QK_NORM_MAX_TOKEN_NUM,
    "olmoe": getattr(olmoe, "module_name", ""),
    "lines": [outcome.line() for outcome in status.recorded()],
}}))
"""


def look(**environ: str) -> dict[str, Any]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_toggle_puts_it_where_vllm_looks() -> None:
    found = look(**{TOGGLE: "1"})
    assert found["fused"] == found["workspace"] == "vllm_commext.compat.reduce_rms"
    assert found["bound"] > 1 << 20
    assert found["olmoe"] == "vllm_commext.compat.reduce_rms_olmoe"
    assert "commext: reduce_rms active" in found["lines"]


def test_without_the_toggle_everything_is_vllms() -> None:
    found = look()
    assert not str(found["fused"]).startswith("vllm_commext")
    assert found["workspace"] == f"{NORM}.lamport_workspace"
    assert found["bound"] == 2048
    assert found["olmoe"] == "vllm.model_executor.models.olmoe"
    assert f"commext: reduce_rms off ({TOGGLE}=0)" in found["lines"]


def rows(rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS, Q + 2 * KV, generator=random).to(torch.bfloat16)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(77)
    return torch.randn(2 * Q, generator=random), torch.randn(2 * KV, generator=random)


def in_vllm(rank: int, port: int, toggle: str, result: Connection) -> None:
    """MiniMax-M2's and OLMoE's norms at TP2; OLMoE's attention without what is not the norm."""
    os.environ.update({TOGGLE: toggle, "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ["VLLM_DIST_IDENT"] = f"commext_{port}"  # an executor of vLLM's would set it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(2)
        from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
        from vllm.model_executor.models import ModelRegistry

        ModelRegistry.models["OlmoeForCausalLM"].load_model_cls()
        q_weight, k_weight = weights()
        q_norm, k_norm = (MiniMaxText01RMSNormTP(w.numel(), EPS) for w in (q_weight, k_weight))
        for norm, weight in ((q_norm, q_weight), (k_norm, k_weight)):
            norm.weight.data.copy_(weight.chunk(2)[rank])
        with torch.no_grad():
            q, k, v = MiniMaxText01RMSNormTP.forward_qkv(q_norm, k_norm, rows(rank), Q, KV)
        own = rows(rank)[:, Q + KV :]
        olmoe = olmoe_norm(rank, q_weight, k_weight)
    minimax = (q.float().numpy(), k.float().numpy(), bool(torch.equal(v, own)))
    from vllm_commext.compat import reduce_rms

    result.send((minimax, olmoe, sorted(reduce_rms._told)))
    torch.distributed.barrier()


def olmoe_norm(rank: int, q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[Any, Any]:
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.olmoe import OlmoeAttention

    attention = OlmoeAttention.__new__(OlmoeAttention)
    torch.nn.Module.__init__(attention)
    attention.tp_size, attention.tp_rank = 2, rank
    attention.total_num_kv_heads, attention.q_size, attention.kv_size = 2, Q, KV
    attention.q_norm, attention.k_norm = RMSNorm(2 * Q, EPS), RMSNorm(2 * KV, EPS)
    attention.q_norm.weight.data.copy_(q_weight)
    attention.k_norm.weight.data.copy_(k_weight)
    if OlmoeAttention._apply_qk_norm.__module__.startswith("vllm_commext"):
        from vllm_commext.compat.reduce_rms_olmoe import _handle

        attention.commext_handle = _handle(attention)
    q, k, _ = rows(rank).split([Q, KV, KV], dim=-1)
    with torch.no_grad():
        outs = attention._apply_qk_norm(q, k)
    return tuple(out.float().numpy() for out in outs)  # pyright: ignore[reportReturnType]


def at_tp2(toggle: str) -> list[Any]:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=in_vllm, args=(rank, port, toggle, pipes[rank][1]))
        for rank in range(2)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()  # so that a rank that ends without a result is noticed
    try:
        results = []
        for receiver, _ in pipes:
            assert receiver.poll(TIMEOUT_SECONDS)
            results.append(receiver.recv())
    finally:
        for process in ranks:
            process.kill()
    return results


def test_vllms_layers_compute_the_same_with_it() -> None:
    ours, stock = at_tp2("1"), at_tp2("0")
    for rank in range(2):
        assert (ours[rank][2], stock[rank][2]) == (["MiniMax-M2", "OLMoE"], [])
        assert ours[rank][0][2]  # V is left as it was
        for mine, theirs in zip(
            (*ours[rank][0][:2], *ours[rank][1]),
            (*stock[rank][0][:2], *stock[rank][1]),
            strict=True,
        ):
            torch.testing.assert_close(
                torch.from_numpy(mine), torch.from_numpy(theirs), rtol=2**-7, atol=1e-6
            )
    whole = torch.cat([rows(rank)[:, :Q] for rank in range(2)], dim=1).double()
    wanted = torch.nn.functional.rms_norm(whole, (2 * Q,), weights()[0].double(), EPS)
    for rank, part in enumerate(wanted.chunk(2, dim=1)):
        torch.testing.assert_close(
            torch.from_numpy(ours[rank][0][0]).double(), part, rtol=2**-7, atol=1e-6
        )
