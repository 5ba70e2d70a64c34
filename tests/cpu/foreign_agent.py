"""A NIXL agent of nobody's: asks a side channel for a worker's metadata, as anybody can who reaches
it, and sends the worker notifications that are none.

    python foreign_agent.py ours|vllm HOST PORT ENGINE_ID
"""

import sys
import time

import msgspec
import zmq

from vllm_commext.nixl.transport.agent import load_nixl
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import open_description

ANSWER_SECONDS = 20.0
SPREAD_SECONDS = 1.0
NOTIFICATIONS = (b"hello", b"\xff\xfe\x00", b"", b"a:b:c", b"HB:")


def ask(address: str, question: bytes) -> bytes:
    """The first frame of the answer to a question.

    Raises:
        TimeoutError: there was none.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as requester:
        requester.setsockopt(zmq.LINGER, 0)
        requester.connect(address)
        requester.send(question)
        if not requester.poll(int(1000 * ANSWER_SECONDS)):
            raise TimeoutError(f"no answer from {address} within {ANSWER_SECONDS:g} s")
        return requester.recv_multipart()[0]


def agent_metadata(kind: str, address: str, engine_id: str) -> bytes:
    if kind == "ours":
        question = wire.encode(wire.DescribeRequest(engine_id=engine_id, tp_rank=0))
        described = wire.decode_reply(ask(address, question))
        assert isinstance(described, wire.Described), described
        return open_description(described).agent_metadata
    answer = ask(address, msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
    payload = msgspec.msgpack.decode(answer)
    return msgspec.msgpack.decode(payload["agent_metadata_bytes"])["agent_metadata"]


def main() -> None:
    kind, host, port, engine_id = sys.argv[1:]
    metadata = agent_metadata(kind, f"tcp://{host}:{port}", engine_id)
    api = load_nixl()
    agent = api.nixl_agent("foreign", api.nixl_agent_config(backends=["UCX"]))
    name = agent.add_remote_agent(metadata)
    agent.make_connection(name)
    for notification in NOTIFICATIONS:
        agent.send_notif(name, notification)
    time.sleep(SPREAD_SECONDS)


if __name__ == "__main__":
    main()
