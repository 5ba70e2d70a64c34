"""A foreign NIXL agent: asks a side channel for a worker's metadata, as anybody can who reaches it,
and sends the worker notifications that are none.

    python -m tests.chaos.rogue HOST PORT ENGINE_ID SEED COUNT
"""

from __future__ import annotations

import random
import sys
import time

from tests.chaos.garbage import mutations, notifications
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.inquiry import Inquiry

ANSWER_SECONDS = 10.0
SPREAD_SECONDS = 0.5


def main() -> int:
    """Send them; 0 where all were sent."""
    host, port, engine_id, seed, count = sys.argv[1:]
    request = wire.DescribeRequest(engine_id=engine_id, tp_rank=0, consumer="rogue/0")
    inquiry = Inquiry(host, int(port), request)
    try:
        described = _answer(inquiry)
    finally:
        inquiry.close()
    metadata = wire.open_description(described).agent_metadata
    agent = NixlAgent(ConnectorConfig(side_channel_host=host, side_channel_port=int(port)))
    name = agent.add_peer(metadata)
    agent.connect(name)
    for frame in mutations(random.Random(int(seed)), notifications(), int(count)):
        agent.notify(name, frame)
    time.sleep(SPREAD_SECONDS)
    agent.remove_peer(name)
    agent.close()
    return 0


def _answer(inquiry: Inquiry) -> wire.Described:
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        reply = inquiry.poll()
        if isinstance(reply, wire.Described):
            return reply
        time.sleep(0.01)
    raise TimeoutError(f"no answer from {inquiry.address} within {ANSWER_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
