"""Prefill and decode engines on GPUs, several of them on one where need be.

A decode engine computes only the last token of a prompt. So does an engine whose last chunk of a
prompt is its last token: engines of equal chunks compute with the same kernels, and what a decode
engine answers by itself is then equal to the bit to what it answers after a load, where both
engines have the same tensor-parallel size."""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import ROOT, fixed_cache
from tests.kit.cluster import CONNECTOR
from tests.kit.servers import CUDA_ENVIRON, LOOPBACK, VllmServer, free_port

EAGER = os.environ.get("COMMEXT_GPU_EAGER", "0") == "1"
CACHE_BYTES = 1 << 29


@dataclass(frozen=True)
class EngineKind:
    """How engines of one model are started: tokens of a prompt in one step, the decode engine's
    connector, and another one ``beside`` ours in a ``MultiConnector``."""

    chunk_tokens: int
    args: Sequence[str] = ()
    mapped_reads: str = "never"
    connector: tuple[str, str] | None = None
    cache_bytes: int = CACHE_BYTES
    ready_seconds: float = 500.0
    beside: Mapping[str, Any] | None = None


def prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(256) for _ in range(num_tokens)] for _ in range(num_prompts)]


def connector_config(name: str, kind: EngineKind) -> dict[str, Any]:
    """``--kv-transfer-config`` of an engine; it prefills if its name begins with P."""
    prefills = name.startswith("P")
    config: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer" if prefills else "kv_consumer",
        "kv_connector_extra_config": {
            "side_channel_host": LOOPBACK,
            "side_channel_port": free_port(),
            "handshake_timeout": 60,
            "mapped_reads": kind.mapped_reads,
        },
    }
    if kind.connector is not None and not prefills:
        config["kv_connector"], config["kv_connector_module_path"] = kind.connector
    if kind.beside is None:
        return config
    return {
        "kv_connector": "MultiConnector",
        "kv_role": config["kv_role"],
        "kv_connector_extra_config": {"connectors": [config, kind.beside]},
    }


def gpu_server(
    name: str,
    gpus: str,
    model: Path,
    folder: Path,
    kind: EngineKind,
    *,
    plain: bool = False,
    tp: int = 0,
) -> VllmServer:
    """One engine on the given GPUs, as ``"0"`` or ``"0,1"``; a plain one is without the package.

    ``tp`` is its tensor-parallel size, 0 for that of all GPUs.

    Without what FlashInfer compiles for minutes at its first use on a machine."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ: Mapping[str, str] = {
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **({"VLLM_COMMEXT": "0"} if plain else {}),
    }
    return VllmServer(
        name,
        model,
        folder,
        tensor_parallel_size=tp or len(gpus.split(",")),
        kv_transfer_config=None if plain else connector_config(name, kind),
        args=[
            *("--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching"),
            *fixed_cache(kind.cache_bytes),
            *("--max-num-seqs", "16"),
            *("--max-num-batched-tokens", str(kind.chunk_tokens)),
            "--no-enable-flashinfer-autotune",
            *(("--enforce-eager",) if EAGER else ()),
            *kind.args,
        ],
        environ=environ,
        base_environ=CUDA_ENVIRON,
        ready_seconds=kind.ready_seconds,
    )
