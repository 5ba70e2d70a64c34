"""A copy of the installed vLLM with changes that a later release has announced or may bring.

Names are replaced in all of its text at once, so that it works as before under the new ones; what
asks for an old name finds nothing. Files without a change are links to the installed ones, as is
what was compiled of them.
"""

import os
import re
from collections.abc import Mapping
from importlib.util import cache_from_source
from pathlib import Path

VERSION = "0.34.0"
# Each change with the parts of ours that cannot do without what it takes away.
IR, STATES, STEP, REUSE, PAUSE, QUEUE, SUMS = (
    *("vLLM IR goes", "states have other fields", "the engine's step has another name"),
    *("blocks are given up otherwise", "pauses have another name", "queues have other methods"),
    "the communicator has another name",
)
COSTS: Mapping[str, set[str]] = {
    IR: {"fused_norm"},
    STATES: {"nixl states"},
    STEP: {"engine step"},
    REUSE: {"nixl reuse"},
    PAUSE: {"nixl first token", "pauses"},
    QUEUE: {"shm_queue"},
    SUMS: {"allreduce"},
}
CHANGES: Mapping[str, Mapping[str, str]] = {
    IR: {r"\bvllm\.ir\b": "vllm.irs", r"^(\s*from vllm import .*)\bir\b": r"\1irs as ir"},
    STATES: {r"\bmamba_type\b": "state_type", r"\bmamba_cache_mode\b": "state_cache_mode"},
    STEP: {r"\b_process_engine_step\b": "_take_a_step"},
    REUSE: {r"\bunpin_blocks\b": "give_up_blocks"},
    PAUSE: {r"\bPauseState\b": "PauseMode"},
    QUEUE: {r"\bwait_until_ready\b": "wait_for_the_others"},
    SUMS: {r"\bCudaCommunicator\b": "GpuCommunicator"},
}
MOVED = {IR: ("ir", "irs")}


def make(folder: Path, *changes: str) -> Path:
    """Make the copy; returns what is to be first on ``PYTHONPATH``."""
    import vllm

    source = Path(vllm.__file__).parent
    wanted = [(re.compile(old, re.M), new) for one in changes for old, new in CHANGES[one].items()]
    moved = dict(MOVED[one] for one in changes if one in MOVED)
    for found, _, names in os.walk(source):
        if Path(found).name == "__pycache__":
            continue
        top, *others = Path(found).relative_to(source).parts or ("",)
        target = folder.joinpath("vllm", moved.get(top, top), *others)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            _copy(Path(found, name), target / name, wanted)
    version = folder / "vllm" / "_version.py"
    text = f"__version__ = version = '{VERSION}'\n__version_tuple__ = version_tuple = (0, 34, 0)\n"
    version.unlink()
    version.write_text(f"{text}__commit_id__ = commit_id = None\n")
    return folder


def _copy(source: Path, target: Path, changes: list[tuple[re.Pattern[str], str]]) -> None:
    before = source.read_text(encoding="utf-8") if source.suffix == ".py" else ""
    after = before
    for old, new in changes:
        after = old.sub(new, after)
    if after == before:
        target.symlink_to(source)
        compiled = Path(cache_from_source(str(source)))
        if source.suffix == ".py" and compiled.exists():
            link = Path(cache_from_source(str(target)))
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(compiled)
    else:
        target.write_text(after, encoding="utf-8")
