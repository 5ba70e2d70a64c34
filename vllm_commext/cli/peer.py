"""``vllm-commext doctor --peer HOST:PORT``: what a decode engine on this host meets on its way to a
prefill engine: its name, the side channel's port, the secret, NIXL's agents, and reads of memory.

The questions are those of decode engines, so any engine answers them. ``--listen HOST:PORT`` stands
in for one: a side channel whose only worker has a piece of memory and no model.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from vllm_commext.cli import fabric
from vllm_commext.cli.report import Check, Found, Level, Row
from vllm_commext.errors import CommextError, CommextTimeoutError, UnsupportedError
from vllm_commext.nixl.config import ConnectorConfig, parse_address
from vllm_commext.nixl.geometry import layout
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import NO_BACK_OFF, SideChannel, SideChannelClient
from vllm_commext.nixl.wire.connection import addresses
from vllm_commext.nixl.wire.description import (
    WorkerDescription,
    encode_description,
    open_description,
)
from vllm_commext.nixl.wire.seal import SECRET_VARIABLE, read_secret

if TYPE_CHECKING:
    from vllm_commext.nixl.transport.agent import NixlAgent
    from vllm_commext.nixl.transport.probe import Memory, Speed

SIDE_CHANNEL, READS = "side channel", "reads"
"""Sections of the report, and probes: the second one loads NIXL."""
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
READ_SECONDS = 10.0
LOOK_SECONDS = 0.01
NAME = "vllm-commext doctor"
HOST_REMEDY = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST on that host names an address which this one reaches, and "
    "VLLM_NIXL_SIDE_CHANNEL_PORT the port"
)
FIREWALL = "a firewall drops it, or the host is down or the address another's: open TCP {} to there"
NO_NAME = "add it to DNS or to this host's /etc/hosts, or give the address"
NO_SECRET = f"who reaches the port can read KV blocks: set {SECRET_VARIABLE} on both hosts"
NO_ANSWER = (
    "if small packets pass and large ones do not, the MTU differs on the way: `ping -M do -s 8972 "
    "HOST`, and set the same on all NICs and switches; if the port is no side channel, name that"
)
NO_METADATA = (
    "UCX finds no device that both hosts have: compare UCX_TLS and UCX_NET_DEVICES on both, and "
    "`ip address`; `vllm-commext doctor` there names devices that are missing"
)
NO_READ = (
    "UCX's own connections do not come through: set UCX_TCP_PORT_RANGE (20000-20999) on both hosts "
    "and open it both ways; UCX_NET_DEVICES must name NICs of one network; check the MTU"
)


def probe_side_channel(peer: str, secret_file: str) -> Iterable[Check]:
    """Name, port and handshake, each only after the one before."""
    host, port = _parsed(peer)
    for row in (
        Row(SIDE_CHANNEL, "name", partial(_name, host, port), NO_NAME),
        Row(SIDE_CHANNEL, "port", partial(_port, host, port)),
        Row(SIDE_CHANNEL, "handshake", partial(_handshake, host, port, secret_file)),
    ):
        checks = [*row.checks()]
        yield from checks
        if any(check.level is Level.ERROR for check in checks):
            return


def _parsed(peer: str) -> tuple[str, int]:
    found = parse_address(peer)
    assert found is not None  # the command's arguments were checked
    return found


def _name(host: str, port: int) -> Found:
    try:
        found = sorted({str(address[0]) for _, address in addresses(host, port)})
    except (OSError, UnicodeError) as error:
        return Found(f"{host}: {error}", Level.ERROR)
    return Found(f"{host}: {', '.join(found)}")


def _port(host: str, port: int) -> Found:
    family, address = addresses(host, port)[0]
    value = f"{address[0]} port {port}"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as made:
            made.settimeout(CONNECT_SECONDS)
            made.connect(address)
    except ConnectionRefusedError:
        remedy = f"nothing listens there: start the engine; {HOST_REMEDY}"
        return Found(f"{value}: refused", Level.ERROR, remedy=remedy)
    except OSError as error:
        return Found(f"{value}: {error}", Level.ERROR, remedy=FIREWALL.format(port))
    return Found(f"{value}: open")


def _handshake(host: str, port: int, secret_file: str) -> Iterable[Found]:
    """The engine, the secret, and the address that decode engines are given."""
    try:
        secret = read_secret(secret_file)
        answer = _describe(host, port, secret, worker=0)
        engine = open_description(answer)
    except CommextError as error:
        remedy = NO_ANSWER if isinstance(error, CommextTimeoutError) else ""
        yield Found(str(error), Level.ERROR, "secret" if "secret" in str(error) else "", remedy)
        return
    yield Found(f"engine {engine.engine_id!r}, {layout.describe_place(engine.layout)}")
    if secret is None:
        yield Found("none on either host", Level.INFO, "secret", NO_SECRET)
    else:
        yield Found("the same on both hosts", name="secret")
    if answer.host and (answer.host, answer.port) != (host, port):
        found = _name(answer.host, answer.port)
        if found.level is Level.OK:
            found = _port(answer.host, answer.port)
        remedy = f"decode engines are told {answer.host}:{answer.port}: let {HOST_REMEDY}"
        yield found._replace(name="address told", remedy=remedy)


def _describe(host: str, port: int, secret: bytes | None, worker: int) -> wire.Described:
    """A worker's answer to the question that decode engines ask first; CommextError if refused."""
    client = SideChannelClient(secret)
    answers: list[wire.Described | CommextError] = []
    request = wire.DescribeRequest(engine_id="", tp_rank=worker)
    channel = SideChannel(client, (host, port), NO_BACK_OFF)
    channel.ask(request, ANSWER_SECONDS, answers.append, answers.append)
    while not answers:
        client.poll()
        time.sleep(LOOK_SECONDS)
    client.close()
    if isinstance(answers[0], CommextError):
        raise answers[0]
    return answers[0]


class _Said(logging.Handler):
    """Keeps warnings of UCX, and its transports, which it names once for all peers alike."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.transports: Sequence[str] = ()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def failure(self, value: str, remedy: str) -> Found:
        """The remedy with the first line that UCX has said."""
        from vllm_commext.nixl.transport.agent import ucx_log

        ucx_log.transports()
        first = self.lines[0].rpartition("UCX  ")[2] if self.lines else ""
        remedy = NO_READ if "timed out" in first else remedy
        return Found(value, Level.ERROR, remedy=f"{remedy}; UCX: {first}" if first else remedy)


def probe_reads(peer: str, secret_file: str) -> Iterable[Check]:
    """Load NIXL, meet the agent of each worker, and read some of its memory."""
    yield from Row("machine", fabric.DEVICES_VARIABLE, fabric.named_devices).checks()
    yield from Row(READS, "NIXL", partial(_reads, *_parsed(peer), secret_file)).checks()


def _reads(host: str, port: int, secret_file: str) -> Iterable[Found]:
    from vllm_commext.nixl.log import logger
    from vllm_commext.nixl.transport.agent import NixlAgent

    logger.logger.addHandler(said := _Said())
    logger.logger.propagate = False
    try:
        agent = NixlAgent(ConnectorConfig(side_channel_host=host, side_channel_port=port))
    except Exception as error:  # noqa: BLE001 NIXL raises many types
        yield said.failure(f"no agent here: {error or type(error).__name__}", NO_METADATA)
        return
    secret = read_secret(secret_file)
    number, count = 0, 1
    while number < count:
        worker = open_description(_describe(host, port, secret, number))
        count = worker.layout.tp_size * worker.layout.pp_size
        yield _read(agent, worker, said)._replace(name=f"worker {number} of {count}")
        number += 1


def _read(agent: NixlAgent, worker: WorkerDescription, said: _Said) -> Found:
    from vllm_commext.nixl.transport import probe
    from vllm_commext.nixl.transport.agent import ucx_log

    try:
        met = agent.add_peer(worker.agent_metadata)
        run = probe.longest_run(worker.layout)
        remote = probe.Memory(*run, worker.memory_type, worker.device_id)
        local = _memory()
        place = (local.address, local.num_bytes, local.device_id)
        with agent.registered(place, local.memory_type):
            speed = _last(probe.measure(agent, met, local, remote, READ_SECONDS))
    except Exception as error:  # noqa: BLE001 NIXL raises many types
        value = f"NIXL does not reach it: {error or type(error).__name__}"
        return said.failure(value, NO_METADATA)
    if speed is None:
        return said.failure(f"no read ended within {READ_SECONDS:g} s", NO_READ)
    said.transports = ucx_log.transports() or said.transports
    value = probe.describe(speed, said.transports).removeprefix("self-probe: ")
    unused = [port.name for port in fabric.rdma_ports() if port.is_active]
    if unused and "tcp" in said.transports:
        remedy = f"RDMA ports {', '.join(unused)} are not used: UCX_TLS, UCX_NET_DEVICES, memlock"
        return Found(value, Level.WARNING, remedy=remedy)
    return Found(value)


def _last(steps: Generator[None, None, Speed | None]) -> Speed | None:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _memory() -> Memory:
    """Memory of the first GPU that torch finds, else of the host."""
    import torch

    from vllm_commext.nixl.transport.probe import PROBE_BYTES, Memory

    has_gpu = torch.cuda.is_available()
    made = torch.zeros(PROBE_BYTES[-1], dtype=torch.uint8, device="cuda" if has_gpu else "cpu")
    return Memory(made.data_ptr(), made.nbytes, "VRAM" if has_gpu else "DRAM", 0, made)


PROBES = {SIDE_CHANNEL: probe_side_channel, READS: probe_reads}


def listen(place: str, secret_file: str) -> int:
    """Answer `--peer` of another host until interrupted; returns the exit status."""
    host, port = _parsed(place)
    secret = read_secret(secret_file)
    try:
        from vllm_commext.nixl.prefill.side_channel import SideChannelServer
        from vllm_commext.nixl.transport.agent import NixlAgent

        agent = NixlAgent(ConnectorConfig(side_channel_host=host, side_channel_port=port))
        memory = _memory()
    except Exception as error:  # NIXL raises many types
        raise UnsupportedError(f"no NIXL agent here: {error}; see `vllm-commext doctor`") from error
    agent.register([(memory.address, memory.num_bytes)], memory.memory_type, memory.device_id)
    worker = WorkerDescription(
        engine_id=NAME,
        facts={},
        agent_metadata=agent.metadata(),
        memory_type=memory.memory_type,
        device_id=memory.device_id,
        layout=_one_region(memory),
    )
    server = SideChannelServer(NAME, "", host, port, {0: encode_description(worker)}, secret)
    print(f"listening on {host}:{port}, {memory.memory_type}; end it with Ctrl-C", flush=True)
    with suppress(KeyboardInterrupt):
        Event().wait()
    server.close()
    return 0


def _one_region(memory: Memory) -> layout.CacheLayout:
    """The memory as a cache of one layer, in pieces as readers take them."""
    from vllm_commext.nixl.transport.probe import PIECE_BYTES

    number = memory.num_bytes // PIECE_BYTES
    part = layout.StatePart("x", "uint8", 0, 1, True, PIECE_BYTES)
    geometry = layout.StateGeometry(number, PIECE_BYTES, (part,))
    family = layout.Family(0, ["x"], [memory.address], geometry)
    return layout.CacheLayout(1, 0, number, [layout.Group(layout.STATE, 1)], [family])
