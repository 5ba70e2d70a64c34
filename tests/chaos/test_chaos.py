"""The short chaos run: real servers, the proxy in front, constant load, and a fault of each kind
that takes few seconds.  ``make chaos`` is the long one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.judge import ERROR, RIGHT, WRONG
from tests.chaos.report import RunRecord, as_markdown, failures
from tests.chaos.scenario import run
from tests.chaos.schedule import Scenario
from tests.kit import CORRUPTING, LEAKING
from tests.kit.cluster import CONNECTOR
from tests.kit.tiny_model import FEW_LAYERS, write_tiny_model
from vllm_commext.proxy.errors_phases import Resume

KINDS = (
    "side_channel_garbage",
    "client_aborts",
    "stall_prefill",
    "foreign_parameters",
    "kill_prefill",
)
pytestmark = [pytest.mark.usefixtures("forked_servers"), pytest.mark.timeout(900)]
BOUND_SECONDS = 120.0
"""For an answer on a busy machine; ``make chaos`` has the bound that is promised."""

FEW: dict[str, Any] = {"num_requests": 10, "num_prompts": 4, "plain_reference": False}
LONG_STREAMS: dict[str, Any] = {
    **{"num_requests": 30, "num_clients": 6, "num_prompts": 8, "max_tokens": 200},
    **{"spares": True, "streams": True},
}


def run_here(
    folder: Path, say: Callable[[str], None] = lambda _: None, **settings: Any
) -> RunRecord:
    """A run of the dense model on loopback."""
    scenario = Scenario(seed=1, namespaces=False, **settings)
    return run(
        scenario, write_tiny_model(folder / "model", num_layers=FEW_LAYERS["llama"]), folder, say
    )


@pytest.mark.timeout(600)
def test_service_survives_a_fault_of_each_kind_without_a_wrong_token(tmp_path: Path) -> None:
    lines: list[str] = []
    record = run_here(
        tmp_path,
        lines.append,
        num_requests=30,
        num_faults=len(KINDS),
        kinds=KINDS,
        num_clients=2,
        pause_seconds=0.3,
        num_prompts=12,
        plain_reference=False,
        max_delay_seconds=0.5,
        bound_seconds=BOUND_SECONDS,
    )
    report = as_markdown(record) + "\n" + "\n".join(lines)
    assert failures(record, timed=False) == [], report
    assert {fault.kind for fault in record.faults} == set(KINDS)
    assert record.verdicts[WRONG] == 0
    assert record.verdicts[RIGHT] >= 20, report


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_connector_that_damages_what_it_has_read_is_found_out(tmp_path: Path) -> None:
    record = run_here(tmp_path, **FEW, num_faults=0, connector=CORRUPTING)
    report = as_markdown(record)
    assert record.verdicts[WRONG] >= 5, report
    assert record.verdicts[RIGHT] == 0, report
    assert any("wrong" in line for line in failures(record, timed=False)), report


@pytest.mark.long
@pytest.mark.parametrize("connector", [CONNECTOR, LEAKING])
def test_a_connector_that_leaks_at_every_fault_is_found_out(tmp_path: Path, connector: str) -> None:
    faults: dict[str, Any] = {"num_faults": 24, "kinds": ("foreign_parameters",)}
    record = run_here(tmp_path, **FEW, **faults, max_delay_seconds=0.5, connector=connector)
    found = [line for line in failures(record, timed=False) if "and no end" in line]
    assert bool(found) == (connector == LEAKING), as_markdown(record)


@pytest.mark.long
@pytest.mark.parametrize("proxy_args", [(), ("--no-resume",)], ids=["resumed", "not resumed"])
def test_no_stream_is_lost_with_the_engine_that_answers_it(
    tmp_path: Path, proxy_args: tuple[str, ...]
) -> None:
    """Where they do not go on elsewhere, as a control, they end with an error."""
    record = run_here(
        tmp_path, **LONG_STREAMS, num_faults=3, kinds=("kill_decode",), proxy_args=proxy_args
    )
    report = as_markdown(record)
    assert record.resumes.total() >= 3, report
    assert record.verdicts[WRONG] == 0, report
    if proxy_args:
        assert record.verdicts[ERROR] > 0, report
    else:
        assert failures(record, timed=False) == [], report
        assert record.verdicts[ERROR] == 0, report


@pytest.mark.long
def test_no_stream_is_lost_that_is_read_from_the_engine_that_drains(tmp_path: Path) -> None:
    kinds = ("drain_decode", "kill_drained", "kill_taker")
    record = run_here(tmp_path, **LONG_STREAMS, num_faults=6, kinds=kinds, reuse=True)
    report = as_markdown(record)
    assert failures(record, timed=False) == [], report
    assert record.verdicts[ERROR] == 0, report
    assert record.moves[Resume.RESUMED] > 0, report
