"""UCX logs from calls in which nobody else in its process can run Python."""

import subprocess
import sys

from tests.kit.processes import run

BOUND_SECONDS = 240.0
NUM_LINES = 4000
PROGRAM = f"""
import ctypes, os, sys
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.transport.agent import NixlAgent, _loaded_library, ucx_log

agent = NixlAgent(parse_config({{}}, default_host="127.0.0.1", default_port=1))
sys.setswitchinterval(1000.0)  # the log's reader does not come to read


class Component(ctypes.Structure):
    _fields_ = [
        ("level", ctypes.c_int), ("name", ctypes.c_char * 16), ("filter", ctypes.c_char_p)
    ]


dispatch = ctypes.PyDLL(_loaded_library()._name).ucs_log_dispatch  # keeps the interpreter's lock
WARNING, INFO = 2, 4
component = Component(INFO, b"TEST", b"*")
of = b"mpool.c", 1, b"none", WARNING, ctypes.byref(component)
for number in range({NUM_LINES}):
    dispatch(*of, b"object %d was not returned", number)
sys.setswitchinterval(0.005)
ucx_log.transports()  # waits for the reader
print("went on", flush=True)
os._exit(0)  # NIXL's own end of an agent is not asked for
"""


AGENT = """
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.transport.agent import NixlAgent
NixlAgent(parse_config({}, default_host="127.0.0.1", default_port=1))
print("made")
"""
PARENT = f"""
import subprocess, sys
from vllm_commext.nixl.transport.agent import load_nixl

load_nixl()  # UCX's log is attached until an agent is made
subprocess.run([sys.executable, "-c", {AGENT!r}], check=True)
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    done = run([sys.executable, "-c", program], seconds=BOUND_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done


def test_a_process_that_is_started_meanwhile_can_open_the_log() -> None:
    assert "made" in _run(PARENT).stdout


def test_ucx_does_not_wait_for_the_reader_of_its_log() -> None:
    """As where an agent is collected that has requests under way: a line for each."""
    done = _run(PROGRAM)
    assert "went on" in done.stdout
    assert "object 0 was not returned" in done.stderr
