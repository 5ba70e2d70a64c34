"""What a vLLM server refuses, as changes to a body that it serves."""

from typing import Any

from tests.kit.cluster import MAX_MODEL_LEN

TOO_MANY = 100 * MAX_MODEL_LEN
REFUSED: dict[str, dict[str, Any]] = {
    "below one": {"max_tokens": -1},
    "beyond the context": {"max_tokens": TOO_MANY},
    "no number": {"max_tokens": "many"},
    "a fraction": {"max_tokens": 1.5},
    "a list": {"max_tokens": [3]},
    "beyond 64 bits": {"max_tokens": 1 << 70},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "options of another type": {"stream_options": 3, "stream": True},
    "stop tokens of another type": {"stop_token_ids": ["x"]},
    "no list of stop tokens": {"stop_token_ids": "x"},
    "more at least than at most": {"min_tokens": 9},
    "at least a negative number": {"min_tokens": -2},
    "at least a word": {"min_tokens": "few"},
    "samples of another type": {"n": "x"},
    "no sample": {"n": 0},
    "a penalty out of range": {"presence_penalty": 9},
    "a flag of another type": {"ignore_eos": "perhaps"},
    "another model": {"model": "nobody's"},
    "no flag whether to stream": {"stream": "perhaps"},
}
CHAT_REFUSED: dict[str, dict[str, Any]] = {
    "the newer name, below one": {"max_completion_tokens": -1},
    "the newer name, no number": {"max_completion_tokens": "many"},
    "the newer name, beyond the context": {"max_completion_tokens": TOO_MANY},
}
