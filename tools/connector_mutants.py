"""Puts defects that the connector once had back into a copy of it, one at a time, and runs the test
that must notice each.

    python tools/connector_mutants.py [NAME ...]

First, the tests must pass without any. Prints one table; ends with 1 where a defect was not
noticed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NIXL = "vllm_commext/nixl/"
COPIED = ("vllm_commext", "tests", "tools", "docs", "deploy", "pyproject.toml", "README.md")
TEST_SECONDS = 1200.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
        name: what it is called here.
        meaning: what went wrong with it.
        file: where it is put, below ``vllm_commext/nixl``.
        old: the text that it replaces, which is there once.
        new: what comes in its place.
        test: the pytest node that must fail.
    """

    name: str
    meaning: str
    file: str
    old: str
    new: str
    test: str


_AGENTS = "tests/cpu/nixl_agents/"
_CONTRACT = "tests/contract/"
MUTANTS = (
    Mutant(
        "window",
        "models with windows are not cut: the last token misses the first that it attends to",
        "geometry/request_blocks.py",
        "return all(group.kind == FULL for group in groups)",
        "return all(group.kind != STATE for group in groups)",
        f"{_CONTRACT}test_prompt_lengths.py",
    ),
    Mutant(
        "prompt",
        "parameters are not compared with the prompt",
        "decode/prompt_match.py",
        "check_prompt(digests(prompt_of(request), remote.num_tokens), transfer_params.prompt, "
        "source)",
        "pass",
        f"{_CONTRACT}test_prompt_bound.py",
    ),
    Mutant(
        "pages",
        "scales that lie apart are moved as if they were part of a head's tokens",
        "vllm_cache.py",
        "    if quantization not in _IN_PLACE:\n        return PAGES + quantization\n",
        "",
        f"{_CONTRACT}test_cache_layout.py",
    ),
    Mutant(
        "released lists",
        "lists are released while reads can still be made from them",
        "decode/counted.py",
        "        if not self.num_users:\n            self._give_back()",
        "        self._give_back()",
        f"{_AGENTS}test_remote_requests.py::"
        "test_a_first_read_that_cannot_be_posted_leaves_the_lists_to_the_others",
    ),
    Mutant(
        "first release",
        "the first of several uses of a remote request releases it",
        "decode/transfers.py",
        "        if source.num_users == 0:\n            source.release_at",
        "        if True:\n            source.release_at",
        "tests/unit/nixl/test_transfers.py",
    ),
    Mutant(
        "no flow control",
        "every load is posted at once",
        "decode/reads.py",
        "return not link.num_bytes or link.num_bytes + pairs.num_bytes <= self._max_bytes",
        "return True",
        f"{_AGENTS}test_remote_requests.py::"
        "test_a_burst_of_twenty_times_what_the_link_moves_in_a_timeout",
    ),
    Mutant(
        "absolute deadline",
        "a read is late by the time since it was posted, whatever has arrived",
        "decode/reads.py",
        "return link.closed or now - moved >= self._limit_seconds",
        "return link.closed or now - read.posted >= self._limit_seconds",
        f"{_AGENTS}test_remote_requests.py::test_a_read_that_moves_on_is_not_late",
    ),
    Mutant(
        "failures by rank",
        "a failed load is counted on each rank that it failed on",
        "decode/remote_prompts.py",
        "                state.failure = state.failure or reason  # the first one of all ranks\n",
        "                state.failure = reason\n"
        "                self._engine.recorder.count_reason(FAILURES, reason)\n",
        f"{_CONTRACT}test_scheduler_stats.py",
    ),
    Mutant(
        "expiries by rank",
        "an expired request is counted on each rank of the prefill engine",
        "prefill/prefills.py",
        "                state.has_expired = True\n",
        "                self._engine.recorder.count(expired_requests=1)\n",
        f"{_CONTRACT}test_scheduler_stats.py",
    ),
    Mutant(
        "other errors of a load",
        "an error of an unforeseen kind at a load's beginning is nobody's",
        "decode/uses.py",
        "        except Exception as error:  # noqa: BLE001 one load's error is no other's\n"
        '            self.report(load, failure_of(error, "request"))\n',
        "        except UnsupportedError as error:\n"
        '            self.report(load, failure_of(error, "request"))\n',
        f"{_AGENTS}test_faults.py::test_a_refused_load",
    ),
    Mutant(
        "reads taken out",
        "an error in one read loses those behind it",
        "decode/reads.py",
        "        return list(self._reads)\n",
        "        taken, self._reads = self._reads, []\n        return taken\n",
        f"{_AGENTS}test_random_failures.py",
    ),
    Mutant(
        "start outside the guard",
        "a thread that cannot be set up ends, and its loads wait for ever",
        "transfer_thread.py",
        "except Exception as error:  # noqa: BLE001 whatever it is",
        "except MemoryError as error:  # whatever it is",
        f"{_AGENTS}test_remote_requests.py::"
        "test_a_thread_that_cannot_be_set_up_fails_each_load_with_the_reason",
    ),
    Mutant(
        "no release after a failure",
        "a load that fails leaves the prefill engine's blocks to the lease",
        "decode/transfers.py",
        "        self._drop(use, part.worker, 0.0 if use.failure else RELEASE_DELAY_SECONDS)\n",
        "        if use.failure:\n"
        "            self.sources[part.worker].is_gone = True\n"
        "        self._drop(use, part.worker, RELEASE_DELAY_SECONDS)\n",
        f"{_AGENTS}test_remote_requests.py::test_a_load_that_fails_releases_at_once",
    ),
    Mutant(
        "stale bytes",
        "what lies behind the last token in its block is what the block held before",
        "cache_memory.py",
        "        if self._stream is None:\n            self._zero(load)\n            return\n",
        "        if self._stream is None:\n            return\n",
        f"{_CONTRACT}test_last_blocks.py",
    ),
    Mutant(
        "sleep mode",
        "memory is put in the cache's place behind NIXL's back",
        "engine_facts.py",
        '    if getattr(model, "enable_sleep_mode", False):\n',
        "    if False:\n",
        f"{_CONTRACT}test_kv_connector.py::test_sleep_mode_is_refused_with_the_reason",
    ),
    Mutant(
        "all addresses",
        "0.0.0.0 is handed to decode engines as an address",
        "prefill/side_channel.py",
        '    if (getattr(number, "ipv4_mapped", None) or number).is_unspecified:\n',
        "    if False:\n",
        "tests/unit/nixl/test_side_channel.py",
    ),
    Mutant(
        "n-grams on one side",
        "speculation without a cache of its own is refused where one side has it alone",
        "engine_facts.py",
        '_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})',
        "_WITHOUT_KV = frozenset[str]()",
        f"{_CONTRACT}test_kv_connector.py::"
        "test_speculation_is_compared_only_where_it_has_a_kv_cache",
    ),
    Mutant(
        "another connector",
        "parameters of another connector get as far as a frame to its listener",
        "wire/params.py",
        "    if not any(name in params for name in OWN_FIELDS):\n",
        "    if False:\n",
        "tests/unit/nixl/test_params.py",
    ),
)


def first_failure(tests: Sequence[str], mutant: Mutant | None = None) -> str:
    """The first test that fails in a copy of the project, with a defect where one is given; empty
    where all pass.

    Raises:
        RuntimeError: they could not be run, or do not pass without a defect.
    """
    with tempfile.TemporaryDirectory(prefix="commext-mutant-") as name:
        folder = Path(name)
        copy_project(folder)
        if mutant is not None:
            path = folder / NIXL / mutant.file
            path.write_text(mutated(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
            check=False,
        )
    failed = FAILED.search(ended.stdout)
    could_run = ended.returncode in (0, 1)
    if not could_run or (ended.returncode and (mutant is None or failed is None)):
        raise RuntimeError(f"{tests} do not pass:\n{ended.stdout}\n{ended.stderr}")
    return failed[1] if failed else ""


def copy_project(folder: Path) -> None:
    leave_out = shutil.ignore_patterns("__pycache__")
    for entry in COPIED:
        if (ROOT / entry).is_dir():
            shutil.copytree(ROOT / entry, folder / entry, ignore=leave_out)
        else:
            shutil.copy(ROOT / entry, folder / entry)


def mutated(text: str, mutant: Mutant) -> str:
    """A file's text with the defect.

    Raises:
        ValueError: what it replaces is not there exactly once.
    """
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: expected its text once in {mutant.file}, got "
            f"{text.count(mutant.old)} times: bring tools/connector_mutants.py up to date"
        )
    return text.replace(mutant.old, mutant.new)


def main() -> int:
    """Try those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"out of {[one.name for one in MUTANTS]}")
    names = parser.parse_args().names
    chosen = [one for one in MUTANTS if not names or one.name in names]
    first_failure(sorted({one.test for one in chosen}))
    print("| what was put back | it went wrong like this | noticed by |")
    print("|---|---|---|")
    missed = 0
    for mutant in chosen:
        noticed_by = first_failure([mutant.test], mutant)
        missed += not noticed_by
        result = f"`{noticed_by}`" if noticed_by else f"**nothing** (`{mutant.test}` passed)"
        print(f"| {mutant.name} | {mutant.meaning} | {result} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
