"""A foreign NIXL agent: asks a side channel for a worker's metadata, as anybody can who reaches it,
and sends the worker notifications that are none.

    python -m tests.chaos.rogue ours|vllm HOST PORT ENGINE_ID [SEED COUNT]

With a seed they are random, valid ones altered among them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable

import msgspec
import zmq

from tests.chaos.garbage import mutations, notifications
from tests.kit.inquiry import ask
from vllm_commext.nixl.transport.agent import load_nixl
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import open_description

ANSWER_SECONDS = 20.0
SPREAD_SECONDS = 1.0
NOTIFICATIONS = (b"hello", b"\xff\xfe\x00", b"", b"a:b:c", b"HB:")


def agent_metadata(kind: str, host: str, port: int, engine_id: str) -> bytes:
    """Raises ``TimeoutError`` where vLLM's side channel does not answer."""
    if kind == "ours":
        request = wire.DescribeRequest(engine_id=engine_id, tp_rank=0)
        return open_description(ask(host, port, request)).agent_metadata
    with zmq.Context() as context, context.socket(zmq.REQ) as requester:
        requester.setsockopt(zmq.LINGER, 0)
        requester.connect(f"tcp://{host}:{port}")
        requester.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        if not requester.poll(int(1000 * ANSWER_SECONDS)):
            raise TimeoutError(f"no answer from {host}:{port} within {ANSWER_SECONDS:g} s")
        payload = msgspec.msgpack.decode(requester.recv_multipart()[0])
    return msgspec.msgpack.decode(payload["agent_metadata_bytes"])["agent_metadata"]


def main() -> None:
    kind, host, port, engine_id, *drawn = sys.argv[1:]
    metadata = agent_metadata(kind, host, int(port), engine_id)
    api = load_nixl()
    agent = api.nixl_agent("foreign", api.nixl_agent_config(backends=["UCX"]))
    name = agent.add_remote_agent(metadata)
    agent.make_connection(name)
    sent: Iterable[bytes] = NOTIFICATIONS
    if drawn:
        seed, count = map(int, drawn)
        sent = mutations(random.Random(seed), notifications(), count)
    for notification in sent:
        agent.send_notif(name, notification)
    time.sleep(SPREAD_SECONDS)


if __name__ == "__main__":
    main()
