"""What is compared: a plain server, vLLM's connector as it comes and with a layout, and ours; ours
without and with its proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.servers import Variant

from tests.kit import cluster
from tests.kit.metrics import Metrics
from tests.kit.servers import (
    CUDA_ENVIRON,
    LOOPBACK,
    ProxyServer,
    Server,
    VllmServer,
    free_port,
)
from tests.kit.tiny_kinds import BOS_ID, EOS_ID
from tests.kit.tiny_model import write_tiny_model, write_tokenizer

PLAIN, IN_TREE, IN_TREE_LAYOUT, OURS = "plain", "vLLM's", "vLLM's, BLHNC", "ours"
OURS_HND = "ours, HND"
"""Ours in the layout that it asked for before vLLM had others."""
OURS_SAMPLING = "ours, D samples all"
"""Ours with every first token sampled by the decode server."""
OURS_PROXY, OURS_STREAMED = "ours, proxy", "ours, proxy, streamed"
"""Ours behind the proxy, which asks one server after the other, or both at once."""
OURS_MAPPED = "ours, mapped"
"""Ours with the prefill server's memory mapped, where NIXL reads it else; behind the proxy too."""
OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED = f"{OURS_PROXY}, mapped", f"{OURS_STREAMED}, mapped"
PLAIN_PROXY = "plain, proxy"
"""The plain server behind the proxy, which takes it for a decode server and asks no other: what the
proxy itself costs."""
PROXIED: Mapping[str, Sequence[str]] = {
    PLAIN_PROXY: ["--min-prompt-tokens", str(1 << 30)],
    OURS_PROXY: ["--stream-chunks", "never"],
    OURS_STREAMED: [],
    OURS_PROXY_MAPPED: ["--stream-chunks", "never"],
    OURS_STREAMED_MAPPED: [],
}
ON_GPUS_ONLY = (IN_TREE_LAYOUT, OURS_HND, OURS_MAPPED, OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED)
"""vLLM's attention on CPUs takes one layout, and host memory is not mapped."""
PLAINS = (PLAIN, PLAIN_PROXY)
_OURS_PROXIED = (one for one in PROXIED if one != PLAIN_PROXY)
_ALL_OURS = (OURS_HND, OURS_SAMPLING, OURS, OURS_MAPPED, *_OURS_PROXIED)
NAMES = (PLAIN, PLAIN_PROXY, IN_TREE, IN_TREE_LAYOUT, *_ALL_OURS)
# A proxy that was stopped in others' turns must not take that for an outage of the engines.
_PATIENT = ("--health-timeout", "600", "--engine-lost", "3600")
LAYOUTS: Mapping[str, str] = {IN_TREE_LAYOUT: "BLHNC", OURS_HND: "HND"}
EIGHT_BILLION: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_OURS = "vllm:commext_nixl_"
_THEIRS = "vllm:nixl_"


@dataclass(frozen=True)
class Setup:
    """What all servers of a run have in common.

    ``gpus``: of the prefill (or plain) and of the decode server; ``gpu_memory``: share of a GPU's
    memory for each of the servers on it; ``server_args``: for every vLLM.
    """

    device: str
    folder: Path
    max_tokens: int
    concurrency: int
    gpus: Sequence[str]
    gpu_memory: float
    start_seconds: float
    server_args: Sequence[str] = ()


def write_model(setup: Setup) -> tuple[Path, list[str]]:
    """The model's folder and vLLM's options for it: tiny on CPUs, eight billion on GPUs."""
    folder = setup.folder / "model"
    if setup.device == "cpu":
        return write_tiny_model(folder), ["--dtype", "float32", "--enforce-eager"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(EIGHT_BILLION, indent=1))
    write_tokenizer(folder, EIGHT_BILLION["vocab_size"])
    return folder, ["--load-format", "dummy", "--dtype", "bfloat16"]


def _servers_of(name: str) -> str:
    """Whose servers are behind the proxy of this name; its own without a proxy."""
    if name not in PROXIED or name == PLAIN_PROXY:
        return name.removesuffix(", proxy")
    return OURS_MAPPED if name in (OURS_PROXY_MAPPED, OURS_STREAMED_MAPPED) else OURS


def _server(setup: Setup, name: str, role: str, model: Path, options: Sequence[str]) -> VllmServer:
    environ: dict[str, str] = {"VLLM_COMMEXT": "0"}
    if name in _ALL_OURS:
        environ = {"VLLM_COMMEXT_STRICT": "1"}
    if name in LAYOUTS:
        environ["VLLM_KV_CACHE_LAYOUT"] = LAYOUTS[name]
    config: dict[str, Any] | None = None
    if name != PLAIN:
        port = free_port()
        ours = name in _ALL_OURS
        environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
        config = {
            "kv_connector": cluster.CONNECTOR if ours else "NixlConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_buffer_device": setup.device,
        }
        if ours:
            config["kv_connector_extra_config"] = {
                "first_token_from_prefill": name != OURS_SAMPLING,
                "mapped_reads": "auto" if name == OURS_MAPPED else "never",
            }
    args = ["--served-model-name", cluster.MODEL_NAME, "--no-enable-prefix-caching", *options]
    args += setup.server_args
    args += ["--max-model-len", str(setup.max_tokens), "--max-num-seqs", str(setup.concurrency)]
    if setup.device == "cuda":
        args += ["--gpu-memory-utilization", str(setup.gpu_memory)]
        environ["CUDA_VISIBLE_DEVICES"] = setup.gpus[1 if role == "decode" else 0]
    return VllmServer(
        f"{name.replace(', ', '-')}-{role}",
        model,
        setup.folder,
        kv_transfer_config=config,
        args=args,
        environ=environ,
        base_environ=CUDA_ENVIRON if setup.device == "cuda" else None,
        ready_seconds=setup.start_seconds,
    )


@contextmanager
def started(setup: Setup, names: Sequence[str]) -> Iterator[dict[str, Variant]]:
    """All servers, ready; one after the other on a GPU, for each looks at how much memory is
    free. Those with a proxy share the servers of ours without."""
    model, options = write_model(setup)
    is_shared = setup.device == "cuda" and setup.gpus[0] == setup.gpus[1]
    with ExitStack() as stack:
        made: dict[str, dict[str, VllmServer]] = {}
        for name in dict.fromkeys(map(_servers_of, names)):
            made[name] = servers = {}
            for role in ["plain"] if name == PLAIN else ["prefill", "decode"]:
                servers[role] = _server(setup, name, role, model, options)
                stack.callback(servers[role].stop)
                servers[role].start()
                if is_shared:
                    servers[role].wait_ready()
            for role, server in servers.items():
                print(f"{name}, {role}: {server.wait_ready():.0f} s to start", flush=True)
        variants: dict[str, Variant] = {}
        for name in names:
            front: dict[str, Server] = {**made[_servers_of(name)]}
            url = front["plain" if name in PLAINS else "decode"].url
            if name in PROXIED:
                front["proxy"] = proxy = stack.enter_context(_proxy(setup, name, front))
                url = proxy.url
            variants[name] = Variant(url, front)
        yield variants


def _proxy(setup: Setup, name: str, servers: Mapping[str, Server]) -> Server:
    return ProxyServer(
        name.replace(", ", "-"),
        [servers["prefill"].url if name != PLAIN_PROXY else f"http://{LOOPBACK}:{free_port()}"],
        [servers["decode" if name != PLAIN_PROXY else "plain"].url],
        setup.folder,
        args=[*_PATIENT, *PROXIED[name]],
    )


def read_figures(name: str, added: Metrics) -> dict[str, float]:
    """What a decode server's metrics say of the reads between two readings, a request at a time:
    milliseconds to post and to end, bytes, descriptors as NIXL moved them; of ours, how many first
    tokens came from the prefill server, and which part of the bytes was read through mappings."""
    from_prefill: dict[str, float] = {}
    if name in _ALL_OURS:
        requests = added.total(f"{_OURS}first_tokens_total")
        of_prefill = added.total(f"{_OURS}first_tokens_total", way="prefill")
        from_prefill["first from P %"] = 100 * of_prefill / requests if requests else 0.0
        count = added.total(f"{_OURS}transfer_seconds_count")
        seconds, post = (added.total(f"{_OURS}{what}_seconds_sum") for what in ("transfer", "post"))
        num_bytes = added.total(f"{_OURS}bytes_total")
        mapped = added.total(f"{_OURS}mapped_bytes_total")
        from_prefill["mapped %"] = 100 * mapped / num_bytes if num_bytes else 0.0
        descriptors = added.total(f"{_OURS}merged_descriptors_total")
    else:
        count = added.total(f"{_THEIRS}xfer_time_seconds_count")
        seconds, post = (
            added.total(f"{_THEIRS}{what}_time_seconds_sum") for what in ("xfer", "post")
        )
        num_bytes = added.total(f"{_THEIRS}bytes_transferred_sum")
        descriptors = added.total(f"{_THEIRS}num_descriptors_sum")
    share = 1 / count if count else 0.0
    return {
        "read": seconds * share * 1e3,
        "post": post * share * 1e3,
        "MB": num_bytes * share / 1e6,
        "descriptors": descriptors * share,
        "GB/s": num_bytes / seconds / 1e9 if seconds else 0.0,
        **from_prefill,
    }
