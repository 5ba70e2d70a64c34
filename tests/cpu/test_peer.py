"""`vllm-commext doctor --peer` between two network namespaces, over TCP: what is well is told with
its bandwidth, and each fault of the way with its remedy; and to a running engine's side channel."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def fault(found: Checks) -> dict[str, str]:
    """The only error."""
    (error,) = (check for check in found.values() if check["level"] == "error")
    return error


def test_all_is_well(link: Link, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(place, capsys, status=0)
    assert [*found] == ["name", "port", "handshake", "secret", "worker 0 of 1"]
    assert {check["level"] for check in found.values()} == {"ok"}
    assert "GB/s, over tcp" in found["worker 0 of 1"]["value"]


def test_an_unknown_name(link: Link, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(f"nobody.invalid:{PORT}", capsys, status=2)
    assert [*found] == ["name"]
    assert "DNS" in fault(found)["hint"]


def test_a_closed_port(link: Link, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = checks(f"{link.far_address}:{PORT - 1}", capsys, status=2)
    assert fault(found)["value"].endswith("refused")
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in fault(found)["hint"]


def test_a_port_of_which_everything_is_dropped(
    link: Link, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with link.ports_dropped(f"{PORT}"):
        found = checks(place, capsys, status=2)
    assert "timed out" in fault(found)["value"]
    assert "firewall" in fault(found)["hint"]


@pytest.mark.parametrize(
    ("secret", "problem"),
    [("not the one that they were given", "another secret"), ("", "carries no proof")],
)
def test_a_secret_that_is_not_the_peers(
    secret: str,
    problem: str,
    place: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if secret:
        monkeypatch.setenv("COMMEXT_NIXL_SECRET", secret)
    else:
        monkeypatch.delenv("COMMEXT_NIXL_SECRET")
    found = checks(place, capsys, status=2)
    assert fault(found)["name"] == "secret"
    assert problem in fault(found)["value"]
    assert "side_channel_secret_file" in fault(found)["value"]


def test_large_packets_are_lost(link: Link, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with link.large_packets_lost():
        found = checks(place, capsys, status=2)
    assert found["port"]["level"] == "ok"
    assert "MTU" in fault(found)["hint"]


def test_the_ports_of_ucx_are_blocked(
    link: Link, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with link.ports_dropped(PORTS):
        found = checks(place, capsys, status=2)
    assert found["handshake"]["level"] == "ok"
    assert "NIXL_ERR_BACKEND" in fault(found)["value"]  # not after minutes
    assert "UCX_TCP_PORT_RANGE" in fault(found)["hint"]


def test_a_device_that_is_not_here(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    found = checks(place, capsys, status=2)
    assert found["UCX_NET_DEVICES"]["value"] == "mlx5_7:1 is not there"
    assert found["NIXL"]["level"] == "error"
    assert "'mlx5_7:1' is not available" in found["NIXL"]["hint"]  # UCX's own words


def test_a_device_that_is_not_there(
    link: Link, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_7:1")
    assert main.main(["doctor", "--listen", f"{link.near_address}:{PORT}"]) == 2
    assert "no NIXL agent here" in capsys.readouterr().err


def test_devices_of_different_networks(
    link: Link, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(link, PORT + 1, tmp_path, UCX_NET_DEVICES="lo"):
        found = checks(f"{link.far_address}:{PORT + 1}", capsys, status=2)
    assert "UCX_NET_DEVICES" in fault(found)["hint"]


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
