"""Who is compared: ways to place requests on as many engines each, behind our proxy or a router."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from goodputs.engines import BOTH, NIXL, P2P, PLAIN, TIER_PORT, EngineSet
from tests.kit.ports import LOOPBACK, free_port
from tests.kit.servers import Server
from vllm_commext.errors import ConfigError
from vllm_commext.limits import Limits

REPLICAS, FIXED, ORDERED, IN_ORDER = "replicas", "fixed", "ordered", "in-order"
NAMES = (REPLICAS, FIXED, IN_ORDER, ORDERED, NIXL, P2P)
ROUTER = Path(__file__).with_name("p2p.py")
READY_SECONDS = 60.0


@dataclass(frozen=True)
class Contestant:
    """One way: its engines, and the proxy's options but for their addresses.

    num_prefill: engines that only prefill, while the others only decode, 0: each does both, -1:
    half of them; told: the limits that the proxy is to keep, if it can be told any.
    """

    name: str
    engines: EngineSet
    options: tuple[str, ...] = ()
    num_prefill: int = 0
    told: Limits | None = None

    def proxy_options(self, urls: Sequence[str]) -> list[str]:
        """The proxy's options with the engines' addresses."""
        roles = ["--engine"] * len(urls)
        if self.num_prefill:
            num = self.num_prefill if self.num_prefill > 0 else max(len(urls) // 2, 1)
            roles = ["--prefill"] * num + ["--decode"] * (len(urls) - num)
        addresses = [part for pair in zip(roles, urls, strict=True) for part in pair]
        return [*addresses, *self.options]


def limits_of(text: str) -> list[Limits]:
    """Pairs such as ``10:1000,15:1000``: milliseconds a token, and to the first.

    Raises:
        ConfigError: anything else.
    """
    found: list[Limits] = []
    for pair in text.split(","):
        try:
            tpot, first = (float(part) / 1e3 for part in pair.split(":"))
        except ValueError as error:
            raise ConfigError(f"limits: expected TPOT:TTFT in ms, got {pair!r}") from error
        found.append(Limits(tpot, first))
    return found


def make(
    names: Sequence[str],
    step: int,
    replica_steps: Sequence[int],
    told: Sequence[Limits],
    tps: Sequence[int] = (),
    prefills: Sequence[int] = (),
) -> list[Contestant]:
    """All contestants; one that is named twice is there twice, against itself.

    Raises:
        ConfigError: an unknown name.
    """
    both = EngineSet(BOTH, step)
    local, splits = ("--placement", "local"), [(f" {num}P", num) for num in prefills] or [("", -1)]
    found: list[Contestant] = []
    for name in names:
        if name == REPLICAS:
            found.append(Contestant(name, both, local))
        elif name == FIXED:
            found += [Contestant(f"{name}{of}", both, num_prefill=num) for of, num in splits]
        elif name == IN_ORDER:
            order = in_order(told[0].first)
            found.append(Contestant(f"{REPLICAS} in order", both, (*local, *order)))
            for of, num in splits:
                found.append(Contestant(f"{FIXED}{of} in order", both, order, num_prefill=num))
        elif name == NIXL:
            found.append(Contestant(name, EngineSet(NIXL, step), num_prefill=-1))
        elif name == P2P:
            found.append(Contestant(name, EngineSet(P2P, step)))
            found.append(Contestant(f"{name} in turn", EngineSet(P2P, step), ("--in-turn",)))
        elif name == ORDERED:
            found += [ordered(both, limits) for limits in told]
        else:
            raise ConfigError(f"contestants: expected some of {NAMES}, got {name!r}")
    for replica_step in replica_steps:
        plain = EngineSet(PLAIN, replica_step)
        found.append(Contestant(f"{REPLICAS} {replica_step}", plain, local))
    found += [Contestant(f"TP {tp}", EngineSet(PLAIN, step, tp), local) for tp in tps]
    return _told_apart(found)


def in_order(first: float) -> tuple[str, ...]:
    """Options for as many first tokens within *first* seconds as can be."""
    return ("--prompt-order", "shortest", "--ttft-ms", f"{1e3 * first:g}")


def ordered(engines: EngineSet, limits: Limits) -> Contestant:
    """Adaptive placement that is to keep *limits*, and short prompts first."""
    tpot, first = (f"{1e3 * seconds:g}" for seconds in (limits.tpot, limits.first))
    options = ("--placement", "adaptive", "--tpot-ms", tpot, *in_order(limits.first))
    return Contestant(f"{ORDERED} {tpot}/{first}", engines, options, told=limits)


def _told_apart(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Numbers behind names that come again."""
    counts: dict[str, int] = {}
    found: list[Contestant] = []
    for one in contestants:
        counts[one.name] = number = counts.get(one.name, 0) + 1
        found.append(one if number == 1 else replace(one, name=f"{one.name} ({number})"))
    return found


def proxy(one: Contestant, engines: Mapping[EngineSet, Sequence[Server]], folder: Path) -> Server:
    """A contestant's proxy, not started."""
    port, servers = free_port(), engines[one.engines]
    command = [sys.executable, "-m", "vllm_commext", "proxy", "--host", LOOPBACK]
    options = one.proxy_options([server.url for server in servers])
    if one.engines.kind == P2P:
        command = [sys.executable, str(ROUTER)]
        places = [f"{server.url}={server.environ[TIER_PORT]}" for server in servers]
        options = [part for place in places for part in ("--engine", place)] + [*one.options]
    command += ["--port", str(port), *options]
    name = "proxy-" + "".join(part if part.isalnum() else "-" for part in one.name)
    return Server(name, command, folder, port=port, ready_seconds=READY_SECONDS)
