"""How a run goes, and which faults come in which order: the same arguments give the same ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.kit import cluster

PREFILL = "prefill"
DECODE = "decode"
NAMESPACE, STREAMS, SPARES, ADAPTER = "namespace", "streams", "spares", "adapter"

HANDSHAKE_SECONDS = 3.0
TRANSFER_SECONDS = 4.0
LEASE_SECONDS = 8.0
PREFILL_STEP_SECONDS = 8.0
DECODE_STEP_SECONDS = 12.0
BOUND_SECONDS = PREFILL_STEP_SECONDS + DECODE_STEP_SECONDS + 1.0
"""What a client waits at most: both steps of the proxy, and a second."""
MAX_TOKENS = 24


@dataclass(frozen=True)
class Kind:
    """One kind of fault, with the engine that it ends, "" for none, and what it ``needs``: the
    prefill engine in a network namespace, prompts that are read while they are computed, another
    engine that takes over meanwhile, or an adapter with another in its place at hand."""

    name: str
    meaning: str
    kills: str = ""
    needs: str = ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill_prefill", "P is killed, and restarts with its engine id and port", PREFILL),
        Kind("replace_prefill", "P is killed; another engine id and port follow", PREFILL),
        Kind("kill_decode", "D is killed, and restarts with its engine id", DECODE),
        Kind("replace_decode", "D is killed; another engine id follows", DECODE),
        Kind("kill_pair", "P and D are killed at the same moment", needs=SPARES),
        Kind("pause_prefill", "P stands still for less than the deadline of a read"),
        Kind("stall_prefill", "P stands still for longer than handshake and read may take"),
        Kind("pause_decode", "D stands still for a moment"),
        Kind("stall_decode", "D stands still for longer than the proxy waits"),
        Kind("side_channel_garbage", "garbage on P's side channel, by ZMQ and as raw bytes"),
        Kind("rogue_notifications", "a foreign NIXL agent sends P malformed notifications"),
        Kind("expired_lease", "the decode request comes after the lease of its blocks"),
        Kind("replayed_parameters", "request parameters are used again after their blocks were"),
        Kind("foreign_parameters", "request parameters are altered on their way to D"),
        Kind("client_aborts", "clients go away before and within their answers"),
        Kind(
            "crowd_prefill",
            "P has not the blocks for all prompts that it is given, and preempts some",
            needs=STREAMS,
        ),
        Kind("drain_decode", "D is drained under long streams, and comes back", needs=SPARES),
        Kind("kill_drained", "D is killed as streams leave it", needs=SPARES),
        Kind("kill_taker", "D is killed as streams come from one that drains", needs=SPARES),
        Kind(
            "reload_adapter",
            "an adapter is replaced under its name, at D before P, and comes back",
            needs=ADAPTER,
        ),
        Kind("slow_network", "the link between P and D is throttled", needs=NAMESPACE),
        Kind("cut_network", "the link between P and D is cut", needs=NAMESPACE),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault to come, after ``delay_seconds`` of undisturbed load; ``number`` is from 1."""

    number: int
    kind: str
    delay_seconds: float
    seed: int


def plan_faults(
    seed: int, num_faults: int, kinds: Sequence[str], max_delay_seconds: float = 2.0
) -> list[Fault]:
    """Faults in rounds: each round holds every kind once, in an order of its own.

    Raises:
        ValueError: no kind is given, or an unknown one."""
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ValueError(f"expected kinds out of {sorted(KINDS)}, got {unknown or 'none'}")
    rng = random.Random(seed)
    order: list[str] = []
    while len(order) < num_faults:
        order += rng.sample(list(kinds), len(kinds))
    return [
        Fault(number, kind, rng.uniform(0.0, max_delay_seconds), rng.randrange(1 << 31))
        for number, kind in enumerate(order[:num_faults], start=1)
    ]


@dataclass(frozen=True)
class Scenario:
    """How a run goes; what is not said here its name says.

    Without ``plain_reference`` the right answers are the prefill engine's before the first fault.
    A decode engine takes the other policy at each restart. A ``connector`` that does damage has to
    make the run fail. ``spares``: each role has a second engine, which faults come to only by
    ``Testbed.aim``, and decode engines keep their policy. ``streams``: prompts are computed in
    several chunks, and read while they are. ``reuse``: decode engines cache prefixes and offer
    blocks to one another; each request has a salt of its own, so that it is read all the same. With
    more than ``MAX_TOKENS`` as ``max_tokens`` answers are as long as that, and faults come to the
    engine that has most under way; what engines hold is not counted then. ``talks``: chats,
    messages, responses and tool calls are among the requests. ``name``: another model than the tiny
    one that every other request is for. After ``max_seconds`` no fault begins, and no more requests
    are waited for."""

    seed: int
    num_requests: int
    num_faults: int
    kinds: Sequence[str] = tuple(KINDS)
    num_clients: int = 3
    pause_seconds: float = 0.0
    num_prompts: int = 32
    namespaces: bool = True
    plain_reference: bool = True
    max_delay_seconds: float = 2.0
    connector: str = cluster.CONNECTOR
    spares: bool = False
    streams: bool = False
    reuse: bool = False
    args: Sequence[str] = ()
    proxy_args: Sequence[str] = ()
    max_tokens: int = MAX_TOKENS
    talks: bool = False
    name: str = ""
    bound_seconds: float = BOUND_SECONDS
    max_seconds: float = math.inf

    @property
    def aimed(self) -> bool:
        return self.max_tokens > MAX_TOKENS

    @property
    def seeds(self) -> bool:
        """Whether some answers are drawn: on CPUs vLLM ends where the prompt of one that has a seed
        is computed in several chunks."""
        return self.aimed and not self.streams
