"""Two prefill servers, which share a decode server, and two proxies in front of each: one of them
names the decode server to it."""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handovers.variants import Setup
from moving import engines as gpu_engines
from moving.engines import Shape

from tests.kit import cluster
from tests.kit.servers import ProxyServer, Server, VllmServer
from tests.kit.tiny_kinds import BOS_ID, EOS_ID
from tests.kit.tiny_model import write_tokenizer

CACHED, BARE = "P with its own cache", "P without"
OFF, ON = "off", "on"
VOCABULARY = 512
NUM_TURNS = 4
ON_CPUS = (
    f"Llama, 4 layers of 512, float32, one thread a server, blocks of {cluster.BLOCK_SIZE} tokens"
)
ON_GPUS = "Llama, 8B-shaped, bfloat16, blocks of 16 tokens"
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Variant:
    """A proxy, and the servers behind it."""

    engines: str
    reuse: str
    proxy: Server
    prefill: Server
    decode: Server


def on_gpus(args: argparse.Namespace, folder: Path) -> list[VllmServer]:
    """Both prefill servers and the decode server, not started."""
    setup = Setup(
        *("cuda", folder),
        max_tokens=longest_of(args),
        concurrency=max(2, *args.others) + args.turns * any(args.others),
        gpus=args.gpus,
        gpu_memory=0.0,
        start_seconds=args.start_seconds,
        server_args=args.server_args,
    )
    source, target = args.gpus
    bare = ("--no-enable-prefix-caching",)
    shapes = [
        Shape("prefill", source, args.kv_gib),
        Shape("prefill", source, args.kv_gib, bare),
        Shape("decode", target, args.kv_gib),
    ]
    return gpu_engines.make(setup, shapes, 2048, extra_of(args))


def longest_of(args: argparse.Namespace) -> int:
    """Tokens that the longest conversation may come to."""
    return max(args.histories) + 2 * (args.new_tokens + args.answer_tokens) + 64


def extra_of(args: argparse.Namespace) -> dict[str, Any]:
    """Of the connector's configuration."""
    return {
        "reuse_blocks": True,
        "reuse_lookup_timeout": args.lookup_seconds,
        "reuse_min_tokens": args.min_tokens,
    }


def on_cpus(args: argparse.Namespace, folder: Path) -> list[VllmServer]:
    """The same on CPUs."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL, indent=1))
    write_tokenizer(model, VOCABULARY)
    longest = longest_of(args)
    common = ["--load-format", "dummy", "--max-model-len", str(longest)]
    num_blocks = 4 * (NUM_TURNS * (longest // cluster.BLOCK_SIZE + 1))
    common += ["--num-gpu-blocks-override", str(num_blocks)]

    def engine(name: str, role: str, *more: str) -> VllmServer:
        config = cluster.kv_transfer_config(role, extra=extra_of(args))
        return cluster.engine_server(name, model, folder, config, args=[*common, *more])

    return [
        engine("prefill-cached", "kv_producer"),
        engine("prefill-bare", "kv_producer", "--no-enable-prefix-caching"),
        engine("decode", "kv_consumer"),
    ]


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[list[Variant]]:
    """All servers, ready."""
    made = (on_gpus if args.gpus else on_cpus)(args, folder)
    cached, bare, decode = made
    with cluster.all_ready(made), ExitStack() as stack:
        variants: list[Variant] = []
        for engines, prefill in ((CACHED, cached), (BARE, bare)):
            for reuse, options in ((OFF, []), (ON, ["--reuse-blocks"])):
                proxy = ProxyServer(
                    f"{prefill.name}-{reuse}",
                    [prefill.url],
                    [decode.url],
                    folder,
                    args=[*cluster.PATIENT_PROXY_ARGS, *options],
                )
                stack.enter_context(proxy)
                variants.append(Variant(engines, reuse, proxy, prefill, decode))
        yield variants
