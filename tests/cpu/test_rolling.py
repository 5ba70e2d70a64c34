"""Two prefill and two decode engines under load are upgraded one after the other, and rolled back:
from another vLLM to this one, and from an earlier release of this package to this state. No request
fails and no answer is wrong; long answers leave each engine at once. That a wrong one would be
noticed, a decode engine with other weights shows, which then joins them and reads nothing of them.

COMMEXT_TEST_OTHER_PYTHON is the interpreter that has the other vLLM, COMMEXT_TEST_OLDER the folder
that the earlier release is installed in; `make rolling` sets both. COMMEXT_TEST_LONG_TOKENS is how
long the long answers are."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.version import Version

from tests.chaos.judge import is_right
from tests.cpu.event_streams import COMPLETIONS, Told, body_of, canonical, told
from tests.cpu.test_resume import NOTE, by_result
from tests.kit import ROOT, cluster, fleet
from tests.kit.installed import VLLM, release
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, complete, tls
from tests.kit.prompts import prompt_set
from tests.kit.servers import VllmServer
from vllm_commext.proxy.errors_phases import Resume

logger = logging.getLogger("vllm.commext.tests")


@dataclass(frozen=True)
class Build:
    """What an engine runs: the interpreter, and with it vLLM, the folder that this package comes
    from, and whether that has `vllm-commext drain`."""

    name: str
    python: str = sys.executable
    path: str = str(ROOT)
    drains: bool = True


HERE = Build("here")
OTHER = Build("other-vllm", python=os.environ.get("COMMEXT_TEST_OTHER_PYTHON", ""))
OLDER = Build("older", path=os.environ.get("COMMEXT_TEST_OLDER", ""), drains=False)
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Decode engines first, as docs/upgrading.md has it.
ORDER = ("d0", "d1", "p0", "p1")
NUM_PROMPTS = 12
BETWEEN_EVENTS = 20
PAUSE_SECONDS = 0.3
"""Of each client: two cores also start the engines."""
BLOCKS = "vllm:commext_nixl_blocks_total"
ANSWERS = "vllm:request_success_total"

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@dataclass
class Engines:
    """The engines by name, each a process of some build, with args of each server and extra options
    of each connector."""

    folder: Path
    stack: ExitStack
    args: Sequence[str] = ("--no-enable-prefix-caching",)
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    drain_seconds: float = fleet.BOUND_SECONDS
    servers: dict[str, VllmServer] = field(default_factory=dict[str, VllmServer])
    builds: dict[str, Build] = field(default_factory=dict[str, Build])
    num_started: int = 0

    def start(self, name: str, build: Build, model: Path) -> VllmServer:
        """A process in the place of this name, under its address."""
        self.num_started += 1
        args = [*self.args, "--shutdown-timeout", fleet.SHUTDOWN_SECONDS]
        environ = {"PYTHONPATH": build.path}
        if build.drains:
            fleet.drain_file(self.folder, name).unlink(missing_ok=True)
            args += fleet.MIDDLEWARE_ARGS
            environ |= fleet.drain_environ(self.folder, name)
        server = cluster.engine_server(
            f"{self.num_started}-{name}-{build.name}",
            model,
            self.folder,
            cluster.kv_transfer_config(
                KV_ROLES[ROLES.get(name, "decode")], policy="recompute", extra=self.extra
            ),
            port=self.servers[name].port if name in self.servers else None,
            args=args,
            environ=environ,
        )
        # Where the package is not the one that lies here, PYTHONPATH alone names it.
        server.command[:1] = [build.python, *([] if build.path == str(ROOT) else ["-P"])]
        self.stack.callback(server.stop)
        server.start()
        self.servers[name], self.builds[name] = server, build
        return server

    def end(self, name: str, admin: fleet.AdminPort) -> tuple[float, float]:
        """Drain an engine and tell it to end, by the way that its release has; the seconds that
        each took."""
        server, began = self.servers[name], time.monotonic()
        if self.builds[name].drains:
            fleet.drain(server, fleet.drain_file(self.folder, name), self.drain_seconds)
        else:
            # 0.2.0 counts what it holds at the end of a step, and an idle engine takes none.
            prompt = (65,) * cluster.BLOCK_SIZE
            ask = partial(complete, server.url, cluster.MODEL_NAME, prompt, max_tokens=1)
            admin.drain(server.url, look=ask)
        drained = time.monotonic()
        fleet.terminate(server)
        assert fleet.wait_for_end(server) == 0
        server.stop()
        return drained - began, time.monotonic() - drained

    def blocks_read(self) -> dict[str, float]:
        decode = (name for name, role in ROLES.items() if role == "decode")
        return {name: scrape(self.servers[name].url).total(BLOCKS) for name in decode}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path, stack)


def vllm_of(server: VllmServer) -> Version:
    """The release that a server tells: a forked one could be of another interpreter."""
    told = httpx.get(f"{server.url}/version", timeout=60, verify=tls()).json()["version"]
    return release(told)


def roll(
    engines: Engines, build: Build, model: Path, admin: fleet.AdminPort, load: fleet.Load
) -> Mapping[str, float]:
    """Replace all engines by others; what the decode engines read while they alone were."""
    read: Mapping[str, float] = {}
    for name in ORDER:
        engines.end(name, admin)
        engines.start(name, build, model).wait_ready()
        admin.undrain(engines.servers[name].url)
        load.go_on(BETWEEN_EVENTS)
        assert load.problems == [], f"after {name} became {build.name}"
        if name == "d1":
            read = engines.blocks_read()
        logger.info("%s is %s; %d right", name, build.name, load.num_right)
    return read


@pytest.mark.parametrize(
    ("build", "reads"),
    [
        pytest.param(
            OTHER,
            True,
            marks=pytest.mark.skipif(not OTHER.python, reason="`make rolling` names the other"),
            id="vllm",
        ),
        pytest.param(
            OLDER,
            False,
            marks=pytest.mark.skipif(not OLDER.path, reason="`make rolling` names the release"),
            id="release",
        ),
    ],
)
def test_an_upgrade_and_the_way_back_lose_nothing(
    engines: Engines, model: Path, other_model: Path, build: Build, reads: bool
) -> None:
    place = engines.folder / "model"
    place.symlink_to(model)
    for name in ROLES:
        engines.start(name, build, place)
    for server in engines.servers.values():
        server.wait_ready()
    assert (vllm_of(engines.servers["d0"]) != VLLM) == (build is OTHER)
    prompts = prompt_set(NUM_PROMPTS, seed=3, block_size=cluster.BLOCK_SIZE)
    asked = engines.servers["d0"].url
    known = [complete(asked, cluster.MODEL_NAME, prompt) for prompt in prompts]
    admin = fleet.AdminPort(engines.folder)
    routing = fleet.Routing(engines.folder, engines.servers, admin.args)
    routing.assign(**ROLES)
    with routing.proxy:
        with fleet.Load.of_known(routing.proxy.url, known, PAUSE_SECONDS) as load:
            load.go_on(BETWEEN_EVENTS)
            assert load.problems == []
            across = [roll(engines, to, place, admin, load) for to in (HERE, build)]
        assert load.problems == []
        for read in across:
            assert all((number > 0) == reads for number in read.values()), across
        logger.info("%d right; read across: %s", load.num_right, across)
        place.unlink()
        place.symlink_to(other_model)
        notice_other_weights(engines, place, routing, known)


def notice_other_weights(
    engines: Engines, other_model: Path, routing: fleet.Routing, known: Sequence[Completion]
) -> None:
    """The control: a third decode engine, whose answers are wrong."""
    rogue = engines.start("rogue", HERE, other_model)
    rogue.wait_ready()
    alone = complete(rogue.url, cluster.MODEL_NAME, known[0].prompt)
    assert not is_right(known[0], alone), "its weights have to give other answers"
    before = scrape(rogue.url)
    routing.assign(**ROLES, rogue="decode")
    with fleet.Load.of_known(routing.proxy.url, known) as load:
        deadline = time.monotonic() + fleet.BOUND_SECONDS
        while not load.problems and time.monotonic() < deadline:
            time.sleep(fleet.POLL_SECONDS)
    served = scrape(rogue.url).minus(before).total(ANSWERS)
    logger.info("with the rogue: %d right, it served %d", load.num_right, served)
    assert load.problems, f"{load.num_right} right; the rogue served {served}"
    assert all(problem.startswith("wrong") for problem in load.problems), load.problems
    assert scrape(rogue.url).total(BLOCKS) == 0


NUM_BODIES = 6
NUM_LONG = int(os.environ.get("COMMEXT_TEST_LONG_TOKENS", "2500"))
MAX_LEN = NUM_LONG + 256
LONG_ARGS = (
    *("--max-model-len", str(MAX_LEN)),
    *("--hf-overrides", json.dumps({"max_position_embeddings": MAX_LEN})),
    *("--num-gpu-blocks-override", str(2 * NUM_BODIES * MAX_LEN // cluster.BLOCK_SIZE)),
)
LONG_SECONDS = max(fleet.BOUND_SECONDS, NUM_LONG / 8)
"""For an answer on two cores that others use, too."""


@pytest.fixture(scope="module")
def long_answers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Sequence[tuple[Mapping[str, Any], Any]]:
    options = {"max_tokens": NUM_LONG, "ignore_eos": True, "return_token_ids": True}
    bodies = [body_of(COMPLETIONS, options) for _ in range(NUM_BODIES)]
    with ExitStack() as stack, ThreadPoolExecutor(NUM_BODIES) as pool:
        engines = Engines(tmp_path_factory.mktemp("long"), stack, LONG_ARGS)
        alone = [engines.start("d0", OTHER, model), engines.start("d1", HERE, model)]
        for server in alone:
            server.wait_ready()
        assert len({vllm_of(server) for server in alone}) == 2
        began = time.monotonic()
        found = pool.map(
            lambda server, body: said(told(server, COMPLETIONS, body)), cycle(alone), bodies
        )
        known = list(zip(bodies, found, strict=True))
    logger.info("%d answers at two engines took %.1f s", NUM_BODIES, time.monotonic() - began)
    return known


def said(stream: Told) -> dict[str, Any]:
    """An answer but for its names."""
    whole = canonical(Told("", stream.raw.replace(NOTE, b"")))
    return {name: whole[name] for name in whole if name not in ("frames", "middle")}


def wait_for_streams(server: VllmServer) -> None:
    end = time.monotonic() + fleet.BOUND_SECONDS
    while not scrape(server.url).total("vllm:num_requests_running"):
        assert time.monotonic() < end, f"{server.name} is asked for nothing"
        time.sleep(0.02)


@pytest.mark.skipif(not OTHER.python, reason="`make rolling` names the other")
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "not moved"])
def test_an_upgrade_need_not_wait_for_long_answers(
    model: Path, tmp_path: Path, long_answers: Sequence[tuple[Mapping[str, Any], Any]], moves: bool
) -> None:
    """Of a prefill and two decode engines, from another vLLM to this one."""
    admin, seconds = fleet.AdminPort(tmp_path), dict[str, tuple[float, ...]]()
    with ExitStack() as stack:
        extra = {"reuse_blocks": True}
        engines = Engines(tmp_path, stack, LONG_ARGS, extra, LONG_SECONDS)
        roles = {name: ROLES[name] for name in ("p0", "d0", "d1")}
        for name in roles:
            engines.start(name, OTHER, model)
        for server in engines.servers.values():
            server.wait_ready()
        options = [*admin.args, *([] if moves else ["--no-move"])]
        routing = fleet.Routing(tmp_path, engines.servers, options)
        routing.assign(**roles)

        def read(number: int) -> str:
            body, expected = long_answers[number % len(long_answers)]
            found = told(routing.proxy, COMPLETIONS, body)
            return "" if said(found) == expected else f"wrong: {found.raw[-500:]!r}"

        with routing.proxy:
            began = time.monotonic()
            with fleet.Load(read, bound_seconds=LONG_SECONDS) as clients:
                for name in ("d0", "d1", "p0"):
                    if roles[name] == "decode":
                        wait_for_streams(engines.servers[name])
                    ended = engines.end(name, admin)
                    seconds[name] = *ended, engines.start(name, HERE, model).wait_ready()
                in_all = time.monotonic() - began
            results = by_result(scrape(routing.proxy.url))
    told_of = {name: " + ".join(f"{one:.1f}" for one in took) for name, took in seconds.items()}
    text = "%d right; upgraded within %.1f s, drained, ended and started within %s s; %s"
    logger.warning(text, clients.num_right, in_all, told_of, results)
    assert clients.problems == []
    assert clients.num_right > 0
    assert results.keys() == ({Resume.RESUMED} if moves else {Resume.OFF})
