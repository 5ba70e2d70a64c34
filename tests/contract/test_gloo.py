"""Process groups on one device of Gloo's: real ranks, and vLLM's own processes."""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tests.contract.vllm_process import python, ranks
from vllm_commext.compat import gloo
from vllm_commext.compat.timer_slack import timer_slack
from vllm_commext.testing.servers import free_port

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = pytest.mark.timeout(600)
TOGGLE = "VLLM_COMMEXT_GLOO"
RANK = Path(__file__).with_name("gloo_rank.py")
LOOK = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from torch.distributed import distributed_c10d
from vllm_commext import status
from vllm_commext.compat import gloo, monkey_patch
print(json.dumps({
    "patched": monkey_patch.is_patched(monkey_patch.row_of(gloo.SYMBOL)),
    "lines": [outcome.line() for outcome in status.recorded()],
}))
"""
NO_DEVICES = """
from torch.distributed import distributed_c10d
class ProcessGroupGloo:
    class _Options: _timeout = None
distributed_c10d.ProcessGroupGloo = ProcessGroupGloo
"""


def look(code: str = LOOK, **environ: str) -> tuple[bool, str]:
    """Whether torch's class is patched, and the line about it."""
    done = python(code, **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (line,) = (line for line in found["lines"] if "commext: gloo" in line)
    return found["patched"], line


def test_all_groups_of_a_rank_share_one_device() -> None:
    for found in ranks(RANK, 2, str(free_port()), str(free_port())):
        assert found == {  # the last group was made without us
            "threads": [1, 1, 1, 2],
            "sums": [2.0],
            "timeouts": [True],
            "stateless": 2,
            "class": "ProcessGroupGloo",
        }


def test_only_threads_of_the_first_group_which_makes_the_device_are_patient() -> None:
    slacks: list[float] = []

    class Stock:
        _Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            slacks.append(timer_slack())
            self.options = SimpleNamespace(_devices=[], _threads=2)

    before = timer_slack()
    groups = gloo.sharing(Stock)
    for rank in range(2):
        groups(None, rank, 2, timedelta(seconds=1))
    assert [*slacks, timer_slack()] == pytest.approx([gloo.LOOK_SLACK_SECONDS, before, before])


def test_the_toggle_puts_it_in_place() -> None:
    assert look(**{TOGGLE: "1"}) == (True, "commext: gloo active")
    assert look() == (False, f"commext: gloo off ({TOGGLE}=0)")


def test_a_torch_whose_groups_tell_no_devices_is_left_alone() -> None:
    patched, line = look(NO_DEVICES + LOOK, **{TOGGLE: "1"})
    assert not patched
    assert line == (
        "commext: gloo refused (the options of torch's Gloo groups have no _devices, _threads; "
        "a device for each group remains)"
    )
