"""The one line a capability and process, and when it is logged."""

import logging
import os
import sys
from pathlib import Path

import pytest

from tests.kit.processes import run
from vllm_commext import status
from vllm_commext.status import CapabilityStatus, State


@pytest.mark.parametrize(
    ("state", "given", "level"),
    [
        (State.ACTIVE, {"required": True}, logging.INFO),
        (State.OFF, {}, logging.INFO),
        (State.OFF, {"is_quiet": True}, logging.DEBUG),
        (State.REFUSED, {}, logging.WARNING),
        (State.REFUSED, {"required": True}, logging.ERROR),
    ],
)
def test_a_refusal_is_louder_where_it_was_asked_for_and_a_default_is_no_news(
    state: State, given: dict[str, bool], level: int
) -> None:
    assert CapabilityStatus("nixl", state, **given).level() == level


def test_the_same_outcome_is_logged_once_and_a_changed_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.commext")
    active = CapabilityStatus("nixl", State.ACTIVE)
    refused = CapabilityStatus("nixl", State.REFUSED, "why")
    for outcome in (active, active, refused):
        status.record(outcome)
    assert caplog.messages == [active.line(), refused.line()]
    assert status.recorded() == (refused,)
    assert status.find("nixl") is refused
    assert status.find("other") is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["INFO commext: a active", "WARNING commext: b refused"]),
        ({"VLLM_LOGGING_LEVEL": "warning"}, ["WARNING commext: b refused"]),
        ({"VLLM_CONFIGURE_LOGGING": "0"}, ["commext: b refused"]),
    ],
)
def test_before_logging_is_configured_no_line_is_lost(
    environ: dict[str, str], expected: list[str]
) -> None:
    code = (
        "from vllm_commext.status import CapabilityStatus, State, record\n"
        "record(CapabilityStatus('a', State.ACTIVE))\n"
        "record(CapabilityStatus('b', State.REFUSED))\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    done = run([sys.executable, "-c", code], env={**clean, **environ}, check=True)
    assert done.stderr.splitlines() == expected
    assert done.stdout == ""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_of_the_same_server_tells_only_what_differs(method: str, tmp_path: Path) -> None:
    """Each started by the one before, as vLLM's server, engine and workers are; what an unrelated
    process has told counts for nothing."""
    code = (
        "import multiprocessing, sys\n"
        "from vllm_commext.status import CapabilityStatus, State, record\n"
        "def run(depth):\n"
        "    record(CapabilityStatus('a', State.ACTIVE))\n"
        "    record(CapabilityStatus('b', State.REFUSED, 'why' if depth == 2 else ''))\n"
        "    record(CapabilityStatus('c', State.ACTIVE))\n"
        "    if depth < 3:\n"
        "        context = multiprocessing.get_context(sys.argv[1])\n"
        "        child = context.Process(target=run, args=(depth + 1,))\n"
        "        child.start()\n"
        "        child.join()\n"
        "if __name__ == '__main__':\n"
        "    run(1)\n"
    )
    script = tmp_path / "server.py"
    script.write_text(code)
    environ = {**os.environ, status.TOLD: "commext: a active"}
    done = run([sys.executable, script, method], env=environ, check=True)
    assert done.stderr.splitlines() == [
        "INFO commext: a active",
        "WARNING commext: b refused",
        "INFO commext: c active",
        "WARNING commext: b refused (why)",
        "WARNING commext: b refused",
    ]
