"""CPU time of a prefill server that is idle, and of one that holds a prefilled request and nothing
else: our NIXL connector against the installed vLLM's, and a server without any, which can hold
nothing, in one run.

All servers run at the same time, so whatever else the machine does meets each. Each has answered
one request, then nothing is sent for a while; the CPU seconds of all of a server's processes over
that time are what is printed, first while nothing is held, then after a prefill that nobody
fetches. After each such time all are sent short requests in turn: what holding adds to their
latency is the second figure.

With ``--releases N``, at last and alone, the milliseconds from a reader's release to the scheduler
of an engine of ours that only holds.

    python benchmarks/nixl_idle.py --rounds 3 --seconds 10 --releases 100
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import repository  # noqa: F401
import vllm
from kv_connector import releases

from tests.kit import cluster
from tests.kit.parity import complete, prefill
from tests.kit.processes import cpu_seconds
from tests.kit.servers import Server
from tests.kit.tiny_model import write_tiny_model

PLAIN = "none, and this package off"
CONNECTORS = ("CommextNixlConnector", "NixlConnector", PLAIN)


def server_of(connector: str, model: Path, folder: Path) -> Server:
    """A prefill server; vLLM's connector takes its side channel from the environment."""
    if connector == PLAIN:
        return cluster.plain_server("plain", model, folder)
    config = cluster.kv_transfer_config("kv_producer", connector=connector)
    extra = config["kv_connector_extra_config"]
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(extra["side_channel_port"])}
    if connector == "NixlConnector":
        config["kv_connector_extra_config"] = {}
    return cluster.engine_server(connector, model, folder, config, environ=environ)


def cores_used(servers: dict[str, Server], seconds: float) -> dict[str, float]:
    """Cores that each server's processes used while nothing was sent."""
    time.sleep(3)
    before = {name: cpu_seconds(server.pids()) for name, server in servers.items()}
    time.sleep(seconds)
    return {
        name: (cpu_seconds(one.pids()) - before[name]) / seconds for name, one in servers.items()
    }


def latencies(servers: dict[str, Server], count: int) -> dict[str, list[float]]:
    """Milliseconds of short requests, one at a time, the servers in turn."""
    taken: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(count):
        for name, server in servers.items():
            time.sleep(0.05)
            begun = time.perf_counter()
            complete(server.url, cluster.MODEL_NAME, [40 + number, 41, 42, 43], max_tokens=1)
            taken[name].append((time.perf_counter() - begun) * 1e3)
    return taken


Figures = dict[str, dict[str, list[float]]]
"""State (idle or holding), then connector, then figures."""


def measure(servers: dict[str, Server], rounds: int, seconds: float) -> tuple[Figures, Figures]:
    """Cores and milliseconds in both states."""
    cores: Figures = {}
    waits: Figures = {}
    for state in ("idle", "holding"):
        cores[state] = {name: [] for name in servers}
        waits[state] = {name: [] for name in servers}
        for number in range(rounds):
            if state == "holding":
                for server in (one for name, one in servers.items() if name != PLAIN):
                    prefill(server.url, cluster.MODEL_NAME, list(range(50, 150 + number)))
            for name, used in cores_used(servers, seconds).items():
                cores[state][name].append(used)
            for name, taken in latencies(servers, 20).items():
                waits[state][name] += taken
    return cores, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of silence in a round")
    parser.add_argument("--releases", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nixl-idle-"))
    model = write_tiny_model(folder / "model")
    servers = {name: server_of(name, model, folder) for name in CONNECTORS}
    with cluster.all_ready(servers.values()):
        for server in servers.values():
            complete(server.url, cluster.MODEL_NAME, list(range(40, 90)))
        cores, waits = measure(servers, args.rounds, args.seconds)
    taken = sorted(releases.measure(model, folder, args.releases)) if args.releases else []
    print(f"vLLM {vllm.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    print("| connector | state | cores used, median | each round | short request, ms, median |")
    print("|---|---|---|---|---|")
    for state, used in cores.items():
        for name, values in used.items():
            each = ", ".join(f"{value:.3f}" for value in values)
            latency = statistics.median(waits[state][name])
            median = statistics.median(values)
            print(f"| {name} | {state} | {median:.3f} | {each} | {latency:.1f} |")
    if taken:
        print(
            f"release to scheduler, {len(taken)}: median {statistics.median(taken):.1f} ms, 99th "
            f"percentile {taken[math.ceil(0.99 * len(taken)) - 1]:.1f}, largest {taken[-1]:.1f}"
        )
    print(json.dumps({"cores": cores, "milliseconds": waits, "releases": taken}))


if __name__ == "__main__":
    main()
