"""What is split between prefill and decode engines: tiny models with the options that change what
is in their caches, each with how it is written and how its engines are started."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.tiny_draft import add_mtp, favour, write_eagle
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_lora import RANK, write_lora
from tests.kit.tiny_model import write_tiny_model
from tests.kit.tiny_quantized import pack_experts, quantize_llama

NUM_FAVOURED = 4
FP8_CACHE = ("--kv-cache-dtype", "fp8")
FP8_WEIGHTS = ("--quantization", "fp8_per_tensor")
ADAPTER, OTHER_ADAPTER = "adapter", "other-adapter"
"""The one that is served, and one in the same folder that can take its place."""


@dataclass(frozen=True)
class Served:
    """One thing to serve.

    Attributes:
        kind: of the tiny model.
        args: options of all engines; ``{model}`` and ``{folder}`` stand for the model's folder and
            the one it is in.
        change: what makes this of the tiny model, in its folder.
        name: what requests call the model, its folder if empty.
        nats: how far answers after a load may be from the decode engine's own in a log
            probability; 0.0: equal to the bit. Drafts are checked in steps that begin elsewhere
            after a load, and what is computed in another step is rounded in another way.
        streams: whether its prompts are read while they are computed.
        refused: what the connector says at the start where it does not serve this.
        num_gpus: of an engine of tensor-parallel size 1, more than one for data parallelism.
        shows_damage: whether its answers depend on its cache more than on roundings.
        beside: another connector, after ours in a ``MultiConnector``.
    """

    kind: str = "llama"
    args: Sequence[str] = ()
    change: Callable[[Path], object] | None = None
    name: str = ""
    nats: float = 0.0
    streams: bool = True
    refused: str = ""
    num_gpus: int = 1
    shows_damage: bool = True
    beside: Mapping[str, Any] | None = None

    def write(self, folder: Path, dtype: str = "bfloat16") -> Path:
        """Write the model into ``folder``; return where it is."""
        model = write_tiny_model(folder / "model", self.kind, dtype=dtype)
        if self.change is not None:
            self.change(model)
        return model

    def gpu_options(self, model: Path) -> list[str]:
        """Options of an engine on GPUs."""
        return self._options(KINDS[self.kind].gpu_options, model)

    def cpu_options(self, model: Path) -> list[str]:
        """Options of an engine on CPUs."""
        return self._options(KINDS[self.kind].cpu_options, model)

    def _options(self, common: Sequence[str], model: Path) -> list[str]:
        places = {"{model}": str(model), "{folder}": str(model.parent)}
        options = [*common, *self.args]
        for mark, path in places.items():
            options = [option.replace(mark, path) for option in options]
        return options

    @property
    def chooses_experts(self) -> bool:
        return KINDS[self.kind].chooses_experts


def _speculation(**config: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"num_speculative_tokens": 1, **config})


def _with_eagle(model: Path) -> None:
    write_eagle(model.parent / "eagle", favour(model, NUM_FAVOURED))


def _with_mtp(model: Path) -> None:
    add_mtp(favour(model, NUM_FAVOURED))


def _favouring(model: Path) -> None:
    favour(model, NUM_FAVOURED)


def _choosing_all(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "index_topk": 2048}))


def _with_adapter(model: Path) -> None:
    for seed, name in enumerate((ADAPTER, OTHER_ADAPTER)):
        write_lora(model.parent / name, model, seed)


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
ROUNDED_NATS = 0.25
ONE_STATE = "transfers one state a request, and with speculative decoding"

SERVED: Mapping[str, Served] = {
    **{name: Served(name) for name in KINDS},
    # Sums of tokens in the order in which a kernel has chosen them, which is not always the same.
    # Its indexer chooses tokens by roundings, so the answers of one engine differ from one another.
    "dsv32": Served("dsv32", nats=ROUNDED_NATS, shows_damage=False),
    "dsv32-all": Served("dsv32", change=_choosing_all, nats=ROUNDED_NATS),
    # A prefill engine with several side channels is not streamed from.
    "mixtral-dp": Served(
        "mixtral",
        ("--data-parallel-size", "2", "--enable-expert-parallel"),
        streams=False,
        num_gpus=2,
    ),
    "gptoss-mxfp4": Served("gptoss", ("--moe-backend", "marlin"), change=pack_experts),
    "llama-fp8": Served(args=FP8_WEIGHTS),
    "llama-fp8-cache": Served(args=FP8_CACHE),
    "llama-fp8-scales": Served(args=FP8_CACHE, change=quantize_llama),
    "mla-fp8-cache": Served("mla", FP8_CACHE),
    "llama-lora": Served(
        args=(
            *("--enable-lora", "--max-lora-rank", str(RANK)),
            *("--lora-modules", f"{ADAPTER}={{folder}}/{ADAPTER}"),
        ),
        change=_with_adapter,
        name=ADAPTER,
    ),
    "llama-mtp": Served(args=_speculation(method="mtp"), change=_with_mtp, nats=ROUNDED_NATS),
    "llama-eagle3": Served(
        args=_speculation(method="eagle3", model="{folder}/eagle"),
        change=_with_eagle,
        nats=ROUNDED_NATS,
    ),
    "llama-offload": Served(args=("--enable-prefix-caching",), beside=OFFLOADING),
    "llama-ngram": Served(args=_speculation(**NGRAM), change=_favouring, nats=ROUNDED_NATS),
    "qwen3next-ngram": Served("qwen3next", _speculation(**NGRAM), refused=ONE_STATE),
    "granite-ngram": Served("granite", _speculation(**NGRAM), refused=ONE_STATE),
}
