"""Tiny models with seeded random weights and a byte-level tokenizer, written without any download.

The weights are drawn wide (``Kind.std``), so the next token depends on the whole prompt: what
vLLM's ``--load-format dummy`` gives is close to uniform whatever the KV cache holds, and a test of
a KV connector on such weights cannot fail.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_commext.errors import ConfigError

NUM_BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
NUM_TOKENS = NUM_BYTES + len(SPECIAL_TOKENS)
PAD_ID, BOS_ID, EOS_ID = range(NUM_BYTES, NUM_TOKENS)
MAX_POSITIONS = 4096
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Kind:
    """One architecture: how its configuration is made and how wide its weights are drawn.

    ``std`` is the standard deviation of every weight with two dimensions or more; vectors (norms,
    biases, state-space constants) keep what the architecture's own initialisation gives them.
    """

    make_config: Callable[[str], Any]
    std: float
    meaning: str


def _llama_config(dtype: str) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype=dtype,
    )


KINDS: dict[str, Kind] = {
    "llama": Kind(
        _llama_config,
        std=0.12,
        meaning="dense, grouped-query attention: 8 heads, 4 KV heads, 4 layers",
    ),
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token ``i < 256`` is the byte ``i``; see ``SPECIAL_TOKENS`` for the
    rest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(NUM_BYTES)}
    vocabulary |= {token: NUM_BYTES + place for place, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=MAX_POSITIONS,
    ).save_pretrained(folder)


def write_tiny_model(
    folder: Path | str, kind: str = "llama", seed: int = 0, dtype: str = "float32"
) -> Path:
    """Write configuration, weights and tokenizer of a tiny model; return the folder.

    ``dtype`` is the torch name the weights are stored in; float32 is the default because CPUs
    without bfloat16 instructions compute it natively too. The same arguments give the same files,
    byte for byte.
    Raises ``ConfigError`` for an unknown ``kind``.
    """
    if kind not in KINDS:
        raise ConfigError(f"tiny model: expected a kind out of {sorted(KINDS)}, got {kind!r}")
    import torch
    from transformers import AutoModelForCausalLM

    chosen, target = KINDS[kind], Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(chosen.make_config(dtype), dtype=torch.float32)
    _draw_weights(model, chosen.std, seed)
    _save(model.to(getattr(torch, dtype)), target)
    write_tokenizer(target)
    return target


def _save(model: Any, folder: Path) -> None:
    """``save_pretrained`` without its progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def kv_bytes_per_token(folder: Path | str) -> int:
    """Bytes of KV cache a token takes in all layers of a model with full attention, in its own
    dtype."""
    config = json.loads((Path(folder) / "config.json").read_text())
    heads: int = config["num_key_value_heads"] * config["num_hidden_layers"]
    return 2 * heads * config["head_dim"] * ITEM_BYTES[config["dtype"]]


def _draw_weights(model: Any, std: float, seed: int) -> None:
    """Draw all matrices from one seeded stream, in the order of their names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            values = torch.empty(parameter.shape, dtype=torch.float32).normal_(
                0.0, std, generator=generator
            )
            parameter.data.copy_(values)


def main() -> None:
    """Write one tiny model: ``python -m vllm_commext.testing.tiny_model FOLDER [KIND]``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", nargs="?", default="llama", choices=sorted(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=sorted(ITEM_BYTES))
    args = parser.parse_args()
    print(write_tiny_model(args.folder, args.kind, args.seed, args.dtype))


if __name__ == "__main__":
    main()
