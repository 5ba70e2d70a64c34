"""Twenty scale and role events of four `kv_both` engines under load: engines are drained and ended,
new ones come in their places, roles change, and every request is answered right."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit import cluster, fleet
from tests.kit.parity import Completion, complete
from tests.kit.prompts import prompt_set
from tests.kit.servers import VllmServer

logger = logging.getLogger("vllm.commext.tests")

NUM_ENGINES = 4
NUM_EVENTS = 20
NUM_PROMPTS = 12
BETWEEN_EVENTS = 10
PREFILL, DECODE = "prefill", "decode"

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@dataclass
class Fleet:
    """The engines by name, those that serve and those that wait for their turn.

    Attributes:
        model: folder of the model.
        folder: where files and logs go.
        servers: the process that each name stands for now.
        roles: of those that serve.
        generation: how often servers were started.
    """

    model: Path
    folder: Path
    stack: ExitStack
    servers: dict[str, VllmServer] = field(default_factory=dict[str, VllmServer])
    roles: dict[str, str] = field(default_factory=dict[str, str])
    generation: int = 0

    def start(self, name: str) -> None:
        """A new process in the place of this name."""
        self.generation += 1
        fleet.drain_file(self.folder, name).unlink(missing_ok=True)
        port = self.servers[name].port if name in self.servers else None
        server = cluster.engine_server(
            f"{name}-{self.generation}",
            self.model,
            self.folder,
            cluster.kv_transfer_config("kv_both", policy="recompute"),
            port=port,
            args=["--no-enable-prefix-caching", *fleet.DRAIN_ARGS],
            environ=fleet.drain_environ(self.folder, name),
        )
        self.stack.callback(server.stop)
        server.start()
        self.servers[name] = server

    def names(self, role: str) -> list[str]:
        return [name for name, has in self.roles.items() if has == role]


@pytest.fixture
def engines(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(model, tmp_path, stack)
        for name in "abcd"[:NUM_ENGINES]:
            made.start(name)
        for server in made.servers.values():
            server.wait_ready()
        yield made


def references(engines: Fleet) -> list[Completion]:
    prompts = prompt_set(NUM_PROMPTS, seed=3, block_size=cluster.BLOCK_SIZE)
    url = engines.servers["a"].url
    return [complete(url, cluster.MODEL_NAME, prompt) for prompt in prompts]


Event = Callable[[Fleet, fleet.Routing, random.Random], str]


def change_roles(engines: Fleet, routing: fleet.Routing, rng: random.Random) -> str:
    """A prefill and a decode engine change places, by routing alone."""
    one, other = rng.choice(engines.names(PREFILL)), rng.choice(engines.names(DECODE))
    engines.roles.update({one: DECODE, other: PREFILL})
    routing.assign(**engines.roles)
    return f"{one} decodes, {other} prefills"


def drain_and_serve_again(engines: Fleet, routing: fleet.Routing, rng: random.Random) -> str:
    """An engine is drained, and takes work again."""
    name = rng.choice(sorted(engines.roles))
    file = fleet.drain_file(engines.folder, name)
    fleet.drain(engines.servers[name], file)
    file.unlink()
    return f"{name}, a {engines.roles[name]} engine, was drained and serves again"


def replace(engines: Fleet, routing: fleet.Routing, rng: random.Random) -> str:
    """An engine is drained, ended as Kubernetes does it, and a new one comes under its address."""
    name = rng.choice(sorted(engines.roles))
    fleet.drain(engines.servers[name], fleet.drain_file(engines.folder, name))
    end(engines, name)
    engines.start(name)
    engines.servers[name].wait_ready()
    return f"{name}, a {engines.roles[name]} engine, was replaced"


def end_by_signal(engines: Fleet, routing: fleet.Routing, rng: random.Random) -> str:
    """The routing leaves an engine out and it is told to end in the same moment; it comes back in
    another role."""
    role = PREFILL if len(engines.names(PREFILL)) > 1 else DECODE
    name = rng.choice(engines.names(role))
    del engines.roles[name]
    fleet.drain_file(engines.folder, name).touch()
    routing.assign(**engines.roles)
    end(engines, name)
    engines.start(name)
    engines.servers[name].wait_ready()
    engines.roles[name] = DECODE if role == PREFILL else PREFILL
    routing.assign(**engines.roles)
    return f"{name} left as {role} engine and came back in the other role"


def signal_alone(engines: Fleet, routing: fleet.Routing, rng: random.Random) -> str:
    """An engine is told to end, and nobody else is told: vLLM gives up what comes after that."""
    name = rng.choice(sorted(engines.roles))
    end(engines, name)
    engines.start(name)
    engines.servers[name].wait_ready()
    return f"{name}, a {engines.roles[name]} engine, had a signal alone and came back"


def end(engines: Fleet, name: str) -> None:
    fleet.terminate(engines.servers[name])
    assert fleet.wait_for_end(engines.servers[name]) == 0
    engines.servers[name].stop()


EVENTS: tuple[Event, ...] = (
    change_roles,
    drain_and_serve_again,
    replace,
    end_by_signal,
    signal_alone,
)


def test_nothing_is_lost_in_twenty_scale_and_role_events(engines: Fleet) -> None:
    rng = random.Random(1)
    known = references(engines)
    routing = fleet.Routing(engines.folder, engines.servers)
    engines.roles = {"a": PREFILL, "b": PREFILL, "c": DECODE, "d": DECODE}
    routing.assign(**engines.roles)
    told: list[str] = []
    with routing.proxy, fleet.Load(routing.proxy.url, known) as load:
        load.go_on(BETWEEN_EVENTS)
        for number in range(NUM_EVENTS):
            told.append(EVENTS[number % len(EVENTS)](engines, routing, rng))
            load.go_on(BETWEEN_EVENTS)
            logger.info("%d: %s; %d right", number + 1, told[-1], load.num_right)
            assert load.problems == [], f"after {told[-1]}"
    assert len(told) == NUM_EVENTS
    assert load.problems == []
