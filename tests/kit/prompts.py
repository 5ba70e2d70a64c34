"""Prompts that cover what a KV connector must get right."""

import random

from vllm_commext.errors import ConfigError

Prompt = tuple[int, ...]
PRINTABLE = range(32, 127)
SHARED_TOKENS = 256
MIN_EQUAL_TOKENS = 8
# What the tiny model says first follows from the last characters: a chat ends with its number, or
# hundreds would have to be asked for one that begins with a letter.
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ messages[-1]['content'].split()[-1] }}{% endif %}"
)


def edge_lengths(block_size: int) -> list[int]:
    """Prompt lengths around block boundaries, and long ones; in tokens."""
    near = [blocks * block_size + off for blocks in (1, 2, 4) for off in (-1, 0, 1)]
    return [1, 2, 7, *near, 150, 333, 512, 513, 640, 801]


def prompt_set(
    num_prompts: int, seed: int, block_size: int, num_shared: int = SHARED_TOKENS
) -> list[Prompt]:
    """``num_prompts`` different prompts as token ids of the byte-level tokenizer; three kinds in
    turn.

    Lengths at block boundaries and long ones; prompts that share their first ``num_shared`` tokens;
    and lengths drawn from 3 to 700. Prompts of different seeds share no whole block."""
    if num_prompts < 1:
        raise ConfigError(f"prompts: expected at least 1, got {num_prompts}")
    rng = random.Random(seed)
    lengths = edge_lengths(block_size)
    shared = _draw(rng, num_shared)
    made: list[Prompt] = []
    while len(made) < num_prompts:
        place, kind = divmod(len(made), 3)
        if kind == 0:
            prompt = _draw(rng, lengths[place % len(lengths)])
        elif kind == 1:
            prompt = shared + _draw(rng, 1 + (37 * place) % 200)
        else:
            prompt = _draw(rng, rng.randrange(3, 700))
        if prompt not in made:
            made.append(prompt)
    return made


def equal_prompts(num_prompts: int, num_tokens: int, seed: int) -> list[Prompt]:
    """``num_prompts`` different prompts of ``num_tokens`` tokens each.

    Raises ``ConfigError`` for fewer than 8 tokens: few prompts of so few tokens are different."""
    if num_tokens < MIN_EQUAL_TOKENS:
        raise ConfigError(f"prompts: expected at least {MIN_EQUAL_TOKENS} tokens, got {num_tokens}")
    rng = random.Random(seed)
    made: dict[Prompt, None] = {}
    while len(made) < num_prompts:
        made[_draw(rng, num_tokens)] = None
    return list(made)


def _draw(rng: random.Random, num_tokens: int) -> Prompt:
    return tuple(rng.choice(PRINTABLE) for _ in range(num_tokens))
