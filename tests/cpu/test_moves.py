"""Streams that leave their engine: by the benchmark, with a tiny model, and in a fleet whose decode
engines are drained one after the other under load."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.event_streams import COMPLETIONS, Told, body_of, canonical, told
from tests.cpu.test_resume import NOTE, by_result
from tests.kit import cluster, fleet
from tests.kit.metrics import scrape
from vllm_commext import private_files
from vllm_commext.proxy.resume import Resume

logger = logging.getLogger("vllm.commext.tests")
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("roles", [["prefill", "decode", "decode"], ["both", "both"]], ids=len)
def test_the_benchmark_of_moves_loses_nothing(tmp_path: Path, roles: list[str]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "moves.py"), "--roles", *roles]
    subprocess.run([*command, "--out", str(tmp_path / "found")], check=True, timeout=600)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [one["fault"] for one in rows] == ["drain", "kill"]
    for one in rows:
        assert (one["errors"], one["wrong"]) == ([], 0)
        assert one["moved"] == one["streams"] == 4
        assert one["judged"] == 4 * 600
        assert one["results"] == {"resumed": 4}


KV_ROLES = {"prefill": "kv_producer", "d0": "kv_consumer", "d1": "kv_consumer"}
NUM_BODIES, NUM_CLIENTS, NUM_TOKENS, NUM_ROUNDS = 6, 3, 500, 2
BOUND_SECONDS = 300.0


class Clients:
    """Read one stream after the other, each, and compare it with what is right; the last ones end
    within ``bound_seconds``."""

    def __init__(
        self,
        url: Any,
        known: Sequence[tuple[Mapping[str, Any], Any]],
        bound_seconds: float = BOUND_SECONDS,
    ) -> None:
        self._proxy, self._known, self._bound_seconds = url, known, bound_seconds
        self.num_right = 0
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> "Clients":
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for one in self._threads:
            one.join(self._bound_seconds)
        assert not any(one.is_alive() for one in self._threads)

    def _read(self, number: int) -> None:
        while not self._stop.is_set():
            body, expected = self._known[number % len(self._known)]
            number += NUM_CLIENTS
            try:
                found = told(self._proxy, COMPLETIONS, body)
                is_right = said(found) == expected
            except Exception as error:  # noqa: BLE001 whatever a client sees instead of its answer
                self.problems.append(repr(error))
            else:
                self.num_right += is_right
                self.problems += [] if is_right else [f"wrong: {found.raw[-500:]!r}"]


def said(stream: Told) -> dict[str, Any]:
    """An answer but for its names."""
    whole = canonical(Told("", stream.raw.replace(NOTE, b"")))
    return {name: whole[name] for name in whole if name not in ("frames", "middle")}


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "not moved"])
def test_a_fleet_drains_one_after_the_other_under_load(
    model: Path, tmp_path: Path, moves: bool
) -> None:
    """None of its streams is lost; without moves a drain waits for the longest answer."""
    extra = {"reuse_blocks": True}
    engines = {
        name: cluster.engine_server(
            name,
            model,
            tmp_path,
            cluster.kv_transfer_config(role, policy="recompute", extra=extra),
            args=fleet.DRAIN_ARGS,
            environ=fleet.drain_environ(tmp_path, name),
        )
        for name, role in KV_ROLES.items()
    }
    routing = fleet.Routing(tmp_path, engines, [] if moves else ["--no-move"])
    long = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    routing.assign(prefill="prefill", d0="decode", d1="decode")
    with cluster.all_ready(engines.values()), routing.proxy:
        bodies = [body_of(COMPLETIONS, long) for _ in range(NUM_BODIES)]
        known = [(body, said(told(engines["d0"], COMPLETIONS, body))) for body in bodies]
        seconds: list[float] = []
        with Clients(routing.proxy, known) as clients:
            for name in ("d0", "d1") * NUM_ROUNDS:
                wait_for_streams(engines[name])
                file = fleet.drain_file(tmp_path, name)
                private_files.make(file)
                seconds.append(wait_until_idle(engines[name]))
                file.unlink()
        results = by_result(scrape(routing.proxy.url))
    text = "%d answers right; drained within %s s; %s"
    logger.warning(text, clients.num_right, [f"{one:.2f}" for one in seconds], results)
    assert clients.problems == []
    assert clients.num_right > 0
    assert (Resume.RESUMED in results) is moves
    assert (Resume.OFF in results) is not moves


def num_running(server: Any) -> float:
    return scrape(server.url).total("vllm:num_requests_running")


def wait_for_streams(server: Any) -> None:
    end = time.monotonic() + BOUND_SECONDS
    while not num_running(server):
        assert time.monotonic() < end, f"{server.name} is asked for nothing"
        time.sleep(0.02)


def wait_until_idle(server: Any) -> float:
    """Seconds until the engine answers nobody."""
    began = time.monotonic()
    while num_running(server):
        assert time.monotonic() < began + BOUND_SECONDS, f"{server.name} goes on"
        time.sleep(0.02)
    return time.monotonic() - began
