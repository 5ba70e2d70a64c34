"""How far an engine's start is, and why it failed, from vLLM's log.  Pure."""

import re
from collections.abc import Iterable

STAGES = (
    ("starts", re.compile(r"non-default args|Initializing a V1 LLM engine")),
    ("loads weights", re.compile(r"Starting to load model|Loading (safetensors|pt) checkpoint")),
    ("compiles", re.compile(r"torch\.compile takes|Compiling|Dynamo bytecode|Warming up model")),
    ("sizes its KV cache", re.compile(r"Available KV cache memory|GPU KV cache size|# GPU blocks")),
    ("captures CUDA graphs", re.compile(r"Capturing CUDA graph|Graph capturing")),
    ("opens its API", re.compile(r"Starting vLLM (API )?server|Application startup complete")),
)
"""Stages of a start with the first lines of each, in their order."""
_ERROR = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (\S.*)")
_REFUSED = re.compile(r"\berror: (\S.*)")
_CONSEQUENCES = ("initialization failed", "See root cause above", "EngineCore encountered")
MOST_CAUSE = 400


def stage_of(line: str) -> int:
    """The stage that a log line belongs to, -1: none."""
    return max((n for n, (_, form) in enumerate(STAGES) if form.search(line)), default=-1)


def cause_of(lines: Iterable[str]) -> str:
    """The error that ended a process, in one line; empty where its log has none.

    A failure of an engine's core is followed by others that only say so: the last error that is
    not one of these is taken.
    """
    found = ""
    for line in lines:
        if match := _ERROR.search(line):
            if not any(text in line for text in _CONSEQUENCES):
                found = f"{match[1].rpartition('.')[2]}: {match[2]}"
        elif match := _REFUSED.search(line):
            found = match[1]
    return " ".join(found.split())[:MOST_CAUSE]
