"""Heartbeats of a decode worker: which requests they name, and which peers come into doubt."""

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm_commext.nixl.decode.peers import Peer, PeerState
from vllm_commext.nixl.decode.uses import Uses
from vllm_commext.nixl.geometry.topology import Sources
from vllm_commext.nixl.requests import Load, RemoteRequest, Wait
from vllm_commext.nixl.wire.messages import MAX_ID_CHARACTERS, decode_notification

REMOTE = RemoteRequest("p", "", "h", 5600, 2, "there", ((1,),), 16)


def test_each_peer_hears_of_what_is_used_there_in_messages_that_fit() -> None:
    """Until its last use is over; without what no message can name, and what nobody keeps."""
    agent, peers, local = MagicMock(), MagicMock(), MagicMock(consumer="d/0")
    agent.name = "sender"
    peers.find.return_value = MagicMock(lease_seconds=60.0)
    local.sources = lambda *_: Sources((0, 1), {0: 1, 1: 1})
    uses = Uses(agent, local, peers, MagicMock(), MagicMock())
    names = [f"{number:03}" + MAX_ID_CHARACTERS * "\U0010ffff" for number in range(201)]
    for number, name in enumerate([*names, "half\ud800"]):
        uses.wait(Wait(f"r{number}", replace(REMOTE, request_id=name)))
    uses.wait(Wait("again", replace(REMOTE, request_id=names[0])))
    uses.wait(Wait("offer", replace(REMOTE, request_id="offer", generations=(1,))))

    def heard() -> list[int]:
        agent.notify.reset_mock()
        uses.keep_alive._next = dict.fromkeys(uses.keep_alive._next, 0.0)
        uses.keep_alive.send_due()
        told: Any = [decode_notification(one.args[1]) for one in agent.notify.call_args_list]
        return [len(one.request_ids) for one in told]

    assert heard() == 2 * [100, 100, 1]
    assert heard() == 2 * [100, 100, 1]
    for number in range(150):
        uses.begin(Load(f"r{number}", replace(REMOTE, request_id=names[number])), lambda _: None)
    assert heard() == 2 * [52]
    uses.keep_alive.is_on = False
    assert heard() == []


@pytest.mark.parametrize("state", PeerState)
def test_a_peer_comes_into_doubt_only_where_it_is_read_from(state: PeerState) -> None:
    channel: Any = None
    peer = Peer(("p", "host", 1, 0), channel, state)
    peer.doubt()
    assert peer.state == (PeerState.SUSPECT if state == PeerState.READY else state)
