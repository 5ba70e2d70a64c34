"""Tiny models with seeded random weights and a byte-level tokenizer, written without any download.

The weights are drawn wide (``STD``), so the next token depends on the whole prompt: what vLLM's
``--load-format dummy`` gives is close to uniform whatever the KV cache holds, and a test of a KV
connector on such weights cannot fail."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit.tiny_kinds import (
    COMMON_FIELDS,
    KINDS,
    MAX_POSITIONS,
    NUM_BYTES,
    NUM_TOKENS,
    SPECIAL_TOKENS,
    STD,
    Kind,
)
from vllm_commext.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MEMORY_TOKENS = (128, 2048)
FEW_LAYERS = {"llama": 2}
"""Layers, by kind, of models that servers are asked a lot of: a token takes them two thirds of what
it takes with the kind's own number."""


def write_tokenizer(folder: Path, num_tokens: int = NUM_TOKENS) -> None:
    """Write a tokenizer whose token ``i < 256`` is the byte ``i``; ``SPECIAL_TOKENS`` come next,
    and up to ``num_tokens`` such as no text is split into."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(NUM_BYTES)}
    vocabulary |= {token: NUM_BYTES + place for place, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {f"<{place}>": place for place in range(NUM_TOKENS, num_tokens)}
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
    folder: Path | str,
    kind: str | Kind = "llama",
    seed: int = 0,
    dtype: str = "float32",
    num_layers: int | None = None,
    draw: Callable[[Any, Kind, int], None] | None = None,
) -> Path:
    """Write configuration, weights and tokenizer of a tiny model; return the folder.

    ``dtype`` is the torch name the weights are stored in; float32 is the default because CPUs
    without bfloat16 instructions compute it natively too. ``num_layers``: as the kind has where it
    is None. ``draw``: what gives the weights instead of ``seed``. The same arguments give the same
    files, byte for byte.
    Raises ``ConfigError`` for an unknown ``kind``."""
    if isinstance(kind, str) and kind not in KINDS:
        raise ConfigError(f"tiny model: expected a kind out of {sorted(KINDS)}, got {kind!r}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen, target = KINDS[kind] if isinstance(kind, str) else kind, Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fields = {**COMMON_FIELDS, **chosen.fields, "dtype": dtype}
        if num_layers is not None:
            fields["num_hidden_layers"] = num_layers
        config = AutoConfig.for_model(chosen.model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (draw or _draw_weights)(model, chosen, seed)
    _save(model.to(getattr(torch, dtype)), target, chosen.renames)
    write_tokenizer(target)
    return target


def _save(model: Any, folder: Path, renames: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if renames:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for old, new in renames.items():
            tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})


def _draw_weights(model: Any, kind: Kind, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith("A_log"):
            parameter.data.copy_(_slow_decay(parameter.numel()).view(parameter.shape))
        elif parameter.ndim >= 2:
            values = torch.empty(parameter.shape, dtype=torch.float32).normal_(
                0.0, _width(name, parameter.shape, kind), generator=generator
            )
            parameter.data.copy_(values)


def _width(name: str, shape: Sequence[int], kind: Kind) -> float:
    """Standard deviation of one matrix.

    A depthwise convolution before a state adds up as many products as its kernel is long, not
    hundreds: its width keeps the size of what goes through it."""
    if name.endswith("conv1d.weight"):
        return shape[-1] ** -0.5
    return kind.attention_out_std if name.endswith("o_proj.weight") else STD


def _slow_decay(num_heads: int) -> Any:
    """``A_log`` [num_heads] of heads that remember over ``MEMORY_TOKENS`` at a time step of one.

    A head's state shrinks by exp(-dt A) a token. What the architectures start from (A of one and
    more) forgets within a few tokens, and a wrong state would show in none of the next ones."""
    import torch

    shortest, longest = map(math.log, MEMORY_TOKENS)
    return -torch.linspace(shortest, longest, num_heads)


def main() -> None:
    """Write one tiny model: ``python -m tests.kit.tiny_model FOLDER [KIND]``."""
    kinds = "\n".join(f"  {name:<10}{kind.meaning}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        description=main.__doc__,
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", nargs="?", default="llama", choices=sorted(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=sorted(ITEM_BYTES))
    args = parser.parse_args()
    print(write_tiny_model(args.folder, args.kind, args.seed, args.dtype))


if __name__ == "__main__":
    main()
