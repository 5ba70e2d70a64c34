"""Bodies of completion requests with prompts of random tokens.  Pure."""

import json
from collections.abc import Sequence

import numpy as np

from vllm_commext.bench.workload import Arrival

LEAST_TOKEN = 3
"""Below it are tokens with a meaning of their own in most vocabularies."""
_GROUPS, _OWN = 0, 1


def bodies(
    arrivals: Sequence[Arrival], model: str, vocab_size: int, seed: Sequence[int]
) -> list[bytes]:
    """A streamed, greedy request of exactly ``output_tokens`` for each arrival.

    Tokens are the same for the same *seed* alone: two contestants of different seeds share no
    beginning of a prompt.
    """
    words = [str(token).encode() for token in range(vocab_size)]
    lengths: dict[int, int] = {}
    for one in arrivals:
        if one.group >= 0:
            lengths[one.group] = max(lengths.get(one.group, 0), one.shared_tokens)
    shared = {
        group: _tokens(words, length, (*seed, _GROUPS, group)) for group, length in lengths.items()
    }
    found: list[bytes] = []
    for place, one in enumerate(arrivals):
        begin = shared[one.group][: one.shared_tokens] if one.group >= 0 else []
        own = _tokens(words, one.prompt_tokens - len(begin), (*seed, _OWN, place))
        found.append(_body(model, b",".join(begin + own), one.output_tokens))
    return found


def _tokens(words: Sequence[bytes], count: int, seed: Sequence[int]) -> list[bytes]:
    drawn = np.random.default_rng(list(seed)).integers(LEAST_TOKEN, len(words), count)
    return [words[token] for token in drawn.tolist()]


def _body(model: str, prompt: bytes, output_tokens: int) -> bytes:
    options = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(options).encode()[:-1] + b', "prompt": [' + prompt + b"]}"
