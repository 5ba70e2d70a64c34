"""How long a release takes from a reader's NIXL agent to the prefill engine's scheduler, while that
engine holds blocks and does nothing else."""

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kv_connector.timed_connector import RECORD, TimedNixlConnector
from tests.kit import cluster
from tests.kit.inquiry import ask
from tests.kit.parity import complete, prefill
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import open_description
from vllm_commext.nixl.wire.messages import Released

BENCHMARKS = Path(__file__).resolve().parents[1]
CONSUMER = "benchmark/0"
BOUND_SECONDS = 30.0
POLL_SECONDS = 0.002
PAUSE_SECONDS = (0.3, 0.8)
"""Between a prefill and its release, drawn anew: the engine has long gone to sleep by then."""


def measure(model: Path, folder: Path, count: int) -> list[float]:
    """Milliseconds of so many releases, one at a time; another request stays held all the while."""
    record = folder / "releases"
    record.touch()
    config = cluster.kv_transfer_config(
        "kv_producer",
        connector=TimedNixlConnector.__name__,
        module_path=TimedNixlConnector.__module__,
    )
    environ = {"PYTHONPATH": str(BENCHMARKS), RECORD: str(record)}
    dice = random.Random(3)
    server = cluster.engine_server("releases", model, folder, config, environ=environ)
    with server, ExitStack() as stack:
        complete(server.url, cluster.MODEL_NAME, list(range(40, 90)))
        agent, name = _reader(prefill(server.url, cluster.MODEL_NAME, list(range(50, 150))))
        stack.callback(agent.close)
        stack.callback(agent.remove_peer, name)
        return [
            _one(server.url, agent, name, record, dice.uniform(*PAUSE_SECONDS))
            for _ in range(count)
        ]


def _one(url: str, agent: NixlAgent, name: str, record: Path, pause_seconds: float) -> float:
    params = prefill(url, cluster.MODEL_NAME, list(range(60, 160)))
    request_id = params["remote_request_id"]
    released = Released(request_id=request_id, consumer=CONSUMER, num_consumers=1)
    time.sleep(pause_seconds)
    begun = time.monotonic()
    agent.notify(name, wire.encode(released))
    while time.monotonic() < begun + BOUND_SECONDS:
        for line in record.read_text().splitlines():
            seconds, _, found = line.partition(" ")
            if found == request_id:
                return (float(seconds) - begun) * 1e3
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"the release of {request_id} did not arrive in {BOUND_SECONDS:g} s")


def _reader(params: Mapping[str, Any]) -> tuple[NixlAgent, str]:
    """An agent that is connected to the worker that these parameters are of."""
    host, port = params["remote_host"], params["remote_port"]
    request = wire.DescribeRequest(
        engine_id=params["remote_engine_id"], tp_rank=0, consumer=CONSUMER
    )
    described = open_description(ask(host, port, request))
    agent = NixlAgent(ConnectorConfig(side_channel_host=host, side_channel_port=port))
    name = agent.add_peer(described.agent_metadata)
    agent.connect(name)
    return agent, name
