"""What the scheduler side reports of itself: what its side channel refused, and its quarantine."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm_commext.errors import ConfigError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.scheduler import SchedulerSide
from vllm_commext.nixl.wire.connection import endpoint

HOST = "127.0.0.1"
BOUND_SECONDS = 20


def scheduler_side(port: int, **settings: Any) -> SchedulerSide:
    config = ConnectorConfig(side_channel_host=HOST, side_channel_port=port, **settings)
    groups = [Group(FULL, 16)]
    return SchedulerSide(
        "p", config, groups=groups, tp_size=1, port=port, produces=True, consumes=True
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def test_rejects_of_the_side_channel_are_counted_once() -> None:
    port = free_port()
    side = scheduler_side(port)
    side.serve({})
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint(HOST, port))
            for _ in range(3):
                dealer.send(b"garbage")
                assert dealer.poll(BOUND_SECONDS * 1000)
                dealer.recv_multipart()
        stats = side.take_stats()
        assert stats is not None
        assert stats["side_channel_rejects"] == 3
        assert side.take_stats() is None
    finally:
        side.close()


def test_blocks_in_quarantine_are_shown_until_they_are_given_back() -> None:
    side = scheduler_side(free_port())
    pool: Any = SimpleNamespace(touch=lambda blocks: None, free_blocks=lambda blocks: None)
    side.bind_block_pool(pool)

    def shown() -> float | None:
        stats = side.take_stats()
        return None if stats is None else stats["gauges"]["scheduler"]["quarantined_blocks"]

    assert shown() == 0
    side._quarantine.note_load("r", [SimpleNamespace(), SimpleNamespace()])
    side._quarantine.note_late(["r"])
    assert shown() == 2
    assert shown() is None
    side._quarantine.note_settled({"r": 1})
    assert shown() == 0


def test_a_secret_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="side_channel_secret_file"):
        scheduler_side(free_port(), side_channel_secret_file=missing)
