"""`vllm-commext doctor --peer` between two network namespaces, over TCP: what is well is told with
its bandwidth, and each fault of the way with its remedy; and to a running engine's side channel."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos.network import Link
from tests.kit import cluster
from tests.kit.parity import complete
from vllm_commext.cli import main

pytestmark = pytest.mark.long  # a process with NIXL for each case
SECRET = "one that both hosts have been given"
PORTS = "20000-20999"
PORT = 5699
START_SECONDS = 120
UCX = {"UCX_TLS": "tcp", "UCX_TCP_PORT_RANGE": PORTS}
NOTHING: Mapping[str, str] = {}
Checks = dict[str, dict[str, str]]


@contextmanager
def listening(link: Link, port: int, folder: Path, **environ: str) -> Iterator[None]:
    """``doctor --listen`` at the far end."""
    place = f"{link.far_address}:{port}"
    variables = {"COMMEXT_NIXL_SECRET": SECRET, **UCX, "UCX_NET_DEVICES": link.far, **environ}
    command: list[str | Path] = [
        *link.enter(),
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    command += [Path(sys.executable).with_name("vllm-commext"), "doctor", "--listen", place]
    log = folder / f"listen-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_SECONDS
            while "listening on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def place(link: Link, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with listening(link, PORT, tmp_path_factory.mktemp("listen")):
        yield f"{link.far_address}:{PORT}"


@pytest.fixture(autouse=True)
def near_environ(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**UCX, "UCX_NET_DEVICES": link.near}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMMEXT_NIXL_SECRET", SECRET)


def checks(place: str, capsys: pytest.CaptureFixture[str], status: int) -> Checks:
    assert main.main(["doctor", "--json", "--peer", place]) == status
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def errors(found: Checks) -> list[dict[str, str]]:
    return [check for check in found.values() if check["level"] == "error"]


def test_all_is_well(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(place, capsys, status=0)
    assert [*found] == ["name", "port", "handshake", "secret", "worker 0 of 1"]
    assert {check["level"] for check in found.values()} == {"ok"}
    assert "GB/s, over tcp" in found["worker 0 of 1"]["value"]


class Fault(NamedTuple):
    """A way that is broken, and what its errors, mostly one, say of it, by the checks' field."""

    words: dict[str, str]
    broken: Callable[[Link], AbstractContextManager[object]] = nullcontext
    environ: Mapping[str, str] = NOTHING
    place: str = f"{{}}:{PORT}"
    num_errors: int = 1


FAULTS = {
    "an unknown name": Fault({"name": "name", "hint": "DNS"}, place=f"unknown.invalid:{PORT}"),
    "a closed port": Fault(
        {"value": "refused", "hint": "VLLM_NIXL_SIDE_CHANNEL_HOST"}, place=f"{{}}:{PORT - 1}"
    ),
    "a port of which everything is dropped": Fault(
        {"value": "timed out", "hint": "firewall"}, lambda link: link.ports_dropped(f"{PORT}")
    ),
    "another secret": Fault(
        {"name": "secret", "value": "another secret"}, environ={"COMMEXT_NIXL_SECRET": "x" * 32}
    ),
    "no secret": Fault(
        {"name": "secret", "value": "carries no proof of it: set side_channel_secret_file"},
        environ={"COMMEXT_NIXL_SECRET": ""},
    ),
    "large packets are lost": Fault({"name": "handshake", "hint": "MTU"}, Link.large_packets_lost),
    # Not after minutes.
    "the ports of UCX are blocked": Fault(
        {"name": "worker", "value": "NIXL_ERR_BACKEND", "hint": "UCX_TCP_PORT_RANGE"},
        lambda link: link.ports_dropped(PORTS),
    ),
    # The hint has UCX's own words.
    "a device that is not here": Fault(
        {"name": "UCX_NET_DEVICES", "value": "not there", "hint": "'mlx5_7:1' is not available"},
        environ={"UCX_NET_DEVICES": "mlx5_7:1"},
        num_errors=2,
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_told_with_its_remedy(
    link: Link,
    place: str,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, broken, environ, where, num_errors = FAULTS[case]
    for name, value in environ.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with broken(link):
        found = errors(checks(where.format(link.far_address), capsys, status=2))
    assert len(found) == num_errors
    for field, text in words.items():
        assert any(text in error.get(field, "") for error in found), found


def test_a_running_engine_of_two_ranks(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers as it answers decode engines, and goes on; it has no secret here."""
    monkeypatch.delenv("COMMEXT_NIXL_SECRET")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    config = cluster.kv_transfer_config("kv_producer")
    place = f"localhost:{config['kv_connector_extra_config']['side_channel_port']}"
    environ = {**UCX, "UCX_NET_DEVICES": "lo", "COMMEXT_NIXL_SECRET": None}
    with cluster.engine_server(
        "asked", model, tmp_path, config, tensor_parallel_size=2, environ=environ
    ) as server:
        found = checks(place, capsys, status=0)
        assert len(complete(server.url, cluster.MODEL_NAME, [7, 8, 9]).token_ids) > 0
    assert [found[f"worker {number} of 2"]["level"] for number in (0, 1)] == ["ok", "ok"]
    assert "over tcp" in found["worker 1 of 2"]["value"]
    assert found["secret"]["value"] == "none on either host"
