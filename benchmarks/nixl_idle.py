"""CPU time of an idle prefill server: our NIXL connector against the installed vLLM's, in one run.

Both servers run at the same time, so whatever else the machine does meets both. Each has answered
one request, then nothing is sent for a while; the CPU seconds of all of a server's processes over
that time are what is printed. Rounds take turns with a pause in between.

    python benchmarks/nixl_idle.py --rounds 3 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import vllm

from vllm_commext.testing import cluster
from vllm_commext.testing.parity import complete
from vllm_commext.testing.servers import Server
from vllm_commext.testing.tiny_model import write_tiny_model

CONNECTORS = ("CommextNixlConnector", "NixlConnector")


def cpu_seconds(server: Server) -> float:
    """User and system time of a server's processes so far."""
    ticks = 0
    for pid in server.pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def start(stack: ExitStack, connector: str, model: Path, folder: Path) -> Server:
    """A prefill server; vLLM's connector takes its side channel from the environment."""
    config = cluster.kv_transfer_config("kv_producer", connector=connector)
    extra = config["kv_connector_extra_config"]
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(extra["side_channel_port"])}
    if connector == "NixlConnector":
        config["kv_connector_extra_config"] = {}
    server = cluster.engine_server(connector, model, folder, config, environ=environ)
    stack.callback(server.stop)
    server.start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of silence in a round")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nixl-idle-"))
    model = write_tiny_model(folder / "model")
    used: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    with ExitStack() as stack:
        servers = {name: start(stack, name, model, folder) for name in CONNECTORS}
        for server in servers.values():
            server.wait_ready()
            complete(server.url, cluster.MODEL_NAME, list(range(40, 90)))
        for _ in range(args.rounds):
            time.sleep(3)
            before = {name: cpu_seconds(server) for name, server in servers.items()}
            time.sleep(args.seconds)
            for name, server in servers.items():
                share = (cpu_seconds(server) - before[name]) / args.seconds
                used[name].append(share)
    medians = {name: statistics.median(values) for name, values in used.items()}
    print(f"vLLM {vllm.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    print("| connector | cores used while idle, median | each round |\n|---|---|---|")
    for name, values in used.items():
        print(f"| {name} | {medians[name]:.3f} | {', '.join(f'{v:.3f}' for v in values)} |")
    print(json.dumps({"cores_idle": used}))


if __name__ == "__main__":
    main()
