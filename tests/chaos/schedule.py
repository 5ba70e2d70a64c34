"""Which faults come in which order.  Pure: the same arguments give the same faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True)
class Kind:
    """One kind of fault, with the engine that it ends, "" for none. It may need the prefill engine
    in a network namespace, prompts that are read while they are computed, another engine that takes
    over meanwhile, or an adapter with another in its place at hand."""

    name: str
    meaning: str
    kills: str = ""
    needs_namespace: bool = False
    needs_streams: bool = False
    needs_spares: bool = False
    needs_adapter: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill_prefill", "P is killed, and restarts with its engine id and port", PREFILL),
        Kind("replace_prefill", "P is killed; another engine id and port follow", PREFILL),
        Kind("kill_decode", "D is killed, and restarts with its engine id", DECODE),
        Kind("replace_decode", "D is killed; another engine id follows", DECODE),
        Kind("kill_pair", "P and D are killed at the same moment", needs_spares=True),
        Kind("pause_prefill", "P stands still for less than the deadline of a read"),
        Kind("stall_prefill", "P stands still for longer than handshake and read may take"),
        Kind("pause_decode", "D stands still for a moment"),
        Kind("stall_decode", "D stands still for longer than the proxy waits"),
        Kind("side_channel_garbage", "garbage on P's side channel, by ZMQ and as raw bytes"),
        Kind("proxy_garbage", "garbage on the proxy's port, and requests that are none"),
        Kind("rogue_notifications", "a foreign NIXL agent sends P malformed notifications"),
        Kind("expired_lease", "the decode request comes after the lease of its blocks"),
        Kind("replayed_parameters", "request parameters are used again after their blocks were"),
        Kind("foreign_parameters", "request parameters are altered on their way to D"),
        Kind("client_aborts", "clients go away before and within their answers"),
        Kind("slow_side_channel", "a relay lets the handshake through slowly"),
        Kind("cut_side_channel", "a relay takes the handshake and says nothing"),
        Kind(
            "crowd_prefill",
            "P has not the blocks for all prompts that it is given, and preempts some",
            needs_streams=True,
        ),
        Kind("drain_decode", "D is drained under long streams, and comes back", needs_spares=True),
        Kind("kill_drained", "D is killed as streams leave it", needs_spares=True),
        Kind("kill_taker", "D is killed as streams come from one that drains", needs_spares=True),
        Kind(
            "reload_adapter",
            "an adapter is replaced under its name, at D before P, and comes back",
            needs_adapter=True,
        ),
        Kind("slow_network", "the link between P and D is throttled", needs_namespace=True),
        Kind("cut_network", "the link between P and D is cut", needs_namespace=True),
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
        ValueError: no kind is given, or an unknown one.
    """
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
