"""`register` as vLLM calls it, in processes that have just imported vLLM: what it leaves there, and
what not."""

import json
import platform
from functools import cache
from typing import Any

import pytest

from tests.contract.vllm_process import python, run_at_once
from vllm_commext.compat.fits import PROVEN_MACHINES

NAME = "CommextNixlConnector"
TOGGLE = "VLLM_COMMEXT_NIXL"

# Prints what vLLM looks like after it has loaded its plugins by itself, as one line of JSON.
LOOK = """
import json, sys
from vllm.plugins import load_general_plugins
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
before = {name: id(getter) for name, getter in envs.environment_variables.items()}
names_before = list(KVConnectorFactory._registry)
load_general_plugins()
if "vllm_commext.plugin" in sys.modules:
    sys.modules["vllm_commext.plugin"].register()
validate = getattr(envs, "validate_environ", None)
if validate is None:
    from vllm.platforms import current_platform
    validate = current_platform.validate_environ
try:
    validate(True)
    refused = ""
except ValueError as error:
    refused = str(error)
after = {name: id(getter) for name, getter in envs.environment_variables.items()}
print(json.dumps({
    "replaced": [name for name in before if after.get(name) != before[name]],
    "added": [name for name in after if name not in before],
    "connectors": [name for name in KVConnectorFactory._registry if name not in names_before],
    "factors": {k: v for k, v in envs.compile_factors().items() if "COMMEXT" in k},
    "imported": [name for name in sys.modules if name.startswith("vllm_commext")],
    "nixl": "nixl" in sys.modules,
    "refused": refused,
}))
for name in sys.argv[1:]:
    print(KVConnectorFactory.get_connector_class_by_name(name))
"""
VLLMS_NAME = "NixlConnector"
ALIAS = {"VLLM_COMMEXT_NIXL_ALIAS": "1"}
WITHOUT_NIXL = "import sys; sys.modules['nixl'] = None\n"


@cache
def look(**environ: str) -> tuple[dict[str, Any], str]:
    """What `LOOK` prints in this environment, and all that the process logged."""
    done = python(LOOK, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def toggles() -> list[str]:
    from vllm_commext.settings import TOGGLES

    return [toggle.name for toggle in TOGGLES]


def test_by_default_the_connector_the_toggles_and_what_is_proven_here_are_there() -> None:
    found, log = look()
    assert found["connectors"] == [NAME]
    assert found["added"] == toggles()
    assert found["replaced"] == []
    assert not found["nixl"]
    lines = [line.partition(" (")[0] for line in log.splitlines() if "commext: " in line]
    states = {line.split("commext: ")[1].rsplit(" ", 1)[0]: line.split()[-1] for line in lines}
    proven = "active" if platform.machine() in PROVEN_MACHINES else "off"
    assert states == {
        **dict.fromkeys(("nixl",), "active"),
        **dict.fromkeys(("shm_queue", "cpu_collectives"), proven),
    }  # what is for GPUs, or off by default, is no news
    assert len(lines) == len(states)


def test_the_toggles_are_part_of_the_compile_cache_key() -> None:
    default, _ = look()
    changed, _ = look(VLLM_COMMEXT_NIXL="1", VLLM_COMMEXT_STRICT="1")
    assert list(default["factors"]) == toggles()
    assert default["factors"][TOGGLE] == "auto"
    assert changed["factors"] == {**default["factors"], TOGGLE: "1", "VLLM_COMMEXT_STRICT": "1"}


def test_vllm_knows_our_names_and_does_not_without_us() -> None:
    known, _ = look(VLLM_COMMEXT_NIXL="1", VLLM_COMMEXT_STRICT="1")
    assert known["refused"] == ""
    unknown, _ = look(VLLM_PLUGINS="", VLLM_COMMEXT_NIXL="1")
    assert TOGGLE in unknown["refused"]


def test_left_out_by_vllm_plugins_nothing_of_us_is_even_imported() -> None:
    found, log = look(VLLM_PLUGINS="", VLLM_COMMEXT_NIXL="1")
    assert found["imported"] == []
    assert found["connectors"] == found["added"] == found["replaced"] == []
    assert found["factors"] == {}
    assert "commext:" not in log


def test_turned_off_only_the_name_that_turns_us_off_is_known() -> None:
    found, log = look(VLLM_COMMEXT="0")
    assert found["connectors"] == found["replaced"] == []
    assert found["added"] == ["VLLM_COMMEXT"]
    assert found["refused"] == ""
    assert "commext: nixl off (VLLM_COMMEXT=0)" in log


def test_without_nixl_the_name_is_there_and_tells_the_reason() -> None:
    done = python(WITHOUT_NIXL + LOOK, NAME)
    assert done.returncode != 0
    assert f"{NAME} was asked for by name and cannot run: NIXL is not installed" in done.stderr
    assert "commext: nixl refused (NIXL is not installed" in done.stdout + done.stderr


@pytest.mark.parametrize(("wanted", "module"), [("1", "vllm_commext.nixl"), ("0", "vllm.dist")])
def test_vllms_name_stands_for_ours_where_that_is_wanted(wanted: str, module: str) -> None:
    """`LOOK` registers twice."""
    done = python(LOOK, VLLMS_NAME, NAME, VLLM_COMMEXT_NIXL_ALIAS=wanted)
    assert done.returncode == 0, done.stderr
    under_vllms, under_ours = done.stdout.splitlines()[-2:]
    assert module in under_vllms
    assert (under_vllms == under_ours) == (wanted == "1")


def test_the_command_line_of_vllm_works_with_the_plugin() -> None:
    program = {"module": "vllm.entrypoints.cli.main", "arguments": ["serve", "--help"]}
    (done,) = run_at_once([program], {"VLLM_COMMEXT_NIXL": "auto"})
    assert done.returncode == 0, done.stderr
    assert "usage: vllm serve" in done.stdout
    assert "commext: nixl active" in done.stdout + done.stderr
    assert "Unknown vLLM environment variable" not in done.stdout + done.stderr


# What is patched after a registration, as if this vLLM were one for NVIDIA's GPUs.
PATCHED = """
import json, sys
from vllm.platforms import current_platform
type(current_platform).is_cuda = lambda self: True
type(current_platform).is_cpu = lambda self: False
from vllm_commext import plugin
from vllm_commext.compat.monkey_patch import SYMBOLS, is_patched
plugin.register()
loaded = [symbol for symbol in SYMBOLS if symbol.partition(":")[0] in sys.modules]
print(json.dumps([symbol for symbol in loaded if is_patched(symbol)]))
"""


def test_by_default_on_gpus_a_registration_patches_nothing() -> None:
    """`test_by_itself.py` has what workers patch later."""
    done = python(PATCHED)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    said = [line.split("commext: ")[1].split(" (")[0] for line in lines if "commext: " in line]
    assert said == ["nixl active", "allreduce active"], lines
    assert json.loads(done.stdout.splitlines()[-1]) == []
