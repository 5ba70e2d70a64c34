"""A foreign NIXL agent: asks a side channel for a worker's metadata, as anybody can who reaches it,
and sends the worker notifications that are none.

    python -m tests.chaos.rogue HOST PORT ENGINE_ID SEED COUNT
"""

from __future__ import annotations

import random
import sys
import time

from tests.chaos.garbage import mutations, notifications
from tests.kit.inquiry import ask
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import open_description

SPREAD_SECONDS = 0.5


def main() -> int:
    """Send them; 0 where all were sent."""
    host, port, engine_id, seed, count = sys.argv[1:]
    request = wire.DescribeRequest(engine_id=engine_id, tp_rank=0, consumer="rogue/0")
    metadata = open_description(ask(host, int(port), request)).agent_metadata
    agent = NixlAgent(ConnectorConfig(side_channel_host=host, side_channel_port=int(port)))
    name = agent.add_peer(metadata)
    agent.connect(name)
    for frame in mutations(random.Random(int(seed)), notifications(), int(count)):
        agent.notify(name, frame)
    time.sleep(SPREAD_SECONDS)
    agent.remove_peer(name)
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
