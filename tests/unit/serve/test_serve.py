"""`vllm-commext serve` before it starts anything: commands, refusals, and what logs say."""

import asyncio
import itertools
import json
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession, web

from vllm_commext import drain
from vllm_commext.cli import shapes
from vllm_commext.cli.main import main
from vllm_commext.errors import ConfigError
from vllm_commext.serve import checks, plan, supervisor
from vllm_commext.serve.child import STAGES, cause_of, stage_of
from vllm_commext.serve.plan import Request

REQUEST = Request("m", ("0", "1", "2", "3"), 2, 2, "127.0.0.1", 8000, 15, 1000, ("--seed", "1"))
OURS_SPELT = ("--port", "--port=1", "-t", "-tp=2", "--kv_transfer_config", "--kv-transfer")
OURS_SPELT += ("--kv-transfer-config.kv_role", "--kv_transfer_config.kv_role=kv_producer")


def commands(request: Request) -> list[plan.Command]:
    return plan.commands(request, Path("/run/x"), itertools.count(9000), {})


def test_each_group_of_gpus_has_an_engine_that_can_be_drained_and_the_proxy_knows_all() -> None:
    *engines, proxy = commands(REQUEST)
    assert [one.environ["CUDA_VISIBLE_DEVICES"] for one in engines] == ["0,1", "2,3"]
    numbers: set[str] = {one.url.rpartition(":")[2] for one in engines}
    for one in engines:
        config = json.loads(one.argv[list(one.argv).index("--kv-transfer-config") + 1])
        assert config["kv_role"] == "kv_both"
        assert config["kv_load_failure_policy"] == "recompute"
        numbers.add(str(config["kv_connector_extra_config"]["side_channel_port"]))
        # It would be in the key of compiled code, and another port at each start.
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in one.environ
        assert "vllm_commext.drain.Gate" in one.argv
        assert one.environ["COMMEXT_DRAIN_FILE"].startswith("/run/x/")
        assert list(one.argv)[-2:] == ["--seed", "1"]
    assert [one.url for one in engines] == [
        value for name, value in itertools.pairwise(proxy.argv) if name == "--engine"
    ]
    assert len(numbers) == 4
    assert "--tpot-ms 15 --ttft-ms 1000" in shlex.join(proxy.argv)


def test_without_a_limit_requests_go_where_least_is_to_do() -> None:
    proxy = commands(replace(REQUEST, gpus=(), tpot_ms=0, ttft_ms=0))[-1]
    assert "--placement local" in shlex.join(proxy.argv)
    assert f"--admin-port {proxy.admin_url.rpartition(':')[2]} " in shlex.join(proxy.argv)


def test_the_ways_to_use_engines_are_a_proxy_each() -> None:
    engines, proxies = plan.shapes(REQUEST, Path("/run/x"), itertools.count(9000), {})
    replicas, roles, placed = (shlex.join(one.argv) for one in proxies)
    both = f"--engine {engines[0].url} --engine {engines[1].url}"
    assert replicas.endswith(f"{both} --placement local")
    by_role = f"--prefill {engines[0].url} --decode {engines[1].url}"
    assert roles.endswith(f"{by_role} --prompt-order shortest --ttft-ms 1000")
    assert placed.endswith(f"{both} --tpot-ms 15 --ttft-ms 1000")
    assert len({one.url for one in (*engines, *proxies)}) == 5
    alone = plan.shapes(replace(REQUEST, tp=4), Path("/x"), itertools.count(1), {})[1]
    assert [one.name for one in alone] == ["replicas"]
    assert [shapes._sizes(num) for num in (0, 6, 8)] == [[1], [1, 2], [1, 2, 4, 8]]


def test_variables_of_the_user_win_over_defaults_for_cpus() -> None:
    on_cpu = replace(REQUEST, gpus=(), tp=1)
    mine = plan.commands(on_cpu, Path("/x"), itertools.count(1), {"VLLM_CPU_OMP_THREADS_BIND": "0"})
    assert "VLLM_CPU_OMP_THREADS_BIND" not in mine[0].environ
    assert commands(on_cpu)[0].environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (("--seed", "1"), "m"),
        (("--served-model-name", "a", "b"), "a"),
        (("--seed", "1", "--served_model_name=a"), "a"),
        (("--served", "a", "b"), "a"),
        (("--served_model=a",), "a"),
    ],
)
def test_requests_name_the_model_as_its_engines_do(args: tuple[str, ...], name: str) -> None:
    assert replace(REQUEST, engine_args=args).served_name == name


def test_printed_commands_are_those_that_a_shell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a model", "--engines", "1", "--print", "--", "--seed", "2"]) == 0
    engine, proxy = capsys.readouterr().out.splitlines()
    words = shlex.split(engine)
    assert words[words.index("vllm") :][:3] == ["vllm", "serve", "a model"]
    assert words[-2:] == ["--seed", "2"]
    assert shlex.split(proxy)[:2] == ["vllm-commext", "proxy"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["m", "--gpus", "0,1,2", "--tp", "2"], "multiples of --tp 2"),
        (["m", "--gpus", "0,0"], "each GPU once"),
        (["m", "--gpus", "9"], "expected GPUs of this host (0, 1), got 9"),
        (["m", "--gpus", "1"], "got 1 with 70 of 80 GiB in use"),
        (["m", "--engines", "0"], "--engines 0: expected at least 1"),
        (["m", "--engines", "1", "--port", "99999"], "--port 99999: expected at most 65535"),
        (["m", "--engines", "1", "--gpus", "0"], "expected one of them"),
        (["m", "--tpot-ms", "-5"], "--tpot-ms -5: expected at least 0"),
        (["m", "--ttft-ms", "5"], "add --tpot-ms"),
        (["/no/such/model", "--engines", "1"], "a model's config.json, got none"),
        *((["m", "--engines", "1", "--", one], f"{one} after --: expected") for one in OURS_SPELT),
        (["m", "--engines", "1", "--host", "192.0.2.1"], "give another --port"),
        (["m", "--engines", "1", "--logs", "/dev/null/x"], "a folder that can be written"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    typed: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"0": (500.0, 81920.0), "1": (70 * 1024.0, 81920.0)}
    monkeypatch.setattr(checks, "gpus_here", lambda: here)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["serve", "--port", str(port), *typed]) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert len(err.splitlines()) == 1
    assert not out


def test_a_taken_port_is_known_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        request = replace(REQUEST, gpus=(), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="'Address already in use'; give another --port"):
            checks.check(request, {})


ROOT = "(EngineCore pid=7) ERROR 11-28 [core.py:1] ValueError: No room for 4 GiB of KV cache."
FOLLOWS = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["INFO all is well"], ""),
        ([ROOT, FOLLOWS], "ValueError: No room for 4 GiB of KV cache."),
        (["vllm serve: error: unrecognized arguments: --x"], "unrecognized arguments: --x"),
        (["torch.cuda.OutOfMemoryError: CUDA out of memory.", FOLLOWS], "OutOfMemoryError: CUDA"),
    ],
)
def test_the_cause_of_an_end_is_the_error_that_others_follow(lines: list[str], cause: str) -> None:
    found = cause_of(lines)
    assert found.startswith(cause)
    assert bool(found) == bool(cause)


@asynccontextmanager
async def one_that_says(status: Callable[[], int], **headers: str) -> AsyncIterator[str]:
    """The URL of one whose checks are answered so."""

    async def health(_: web.BaseRequest) -> web.Response:
        return web.Response(status=status(), headers=headers)

    server = await asyncio.get_running_loop().create_server(web.Server(health), "127.0.0.1", 0)
    async with server:
        yield "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())


async def run(served: supervisor.Supervisor) -> int:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        return await asyncio.wait_for(served.run(), 30)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def test_an_engine_that_drains_does_not_count_as_one_that_hangs() -> None:
    for headers in ({drain.HEADER: "1"}, {}):
        async with one_that_says(lambda: 503, **headers) as url, ClientSession() as session:
            assert await supervisor.is_there(session, url, False) == bool(headers)


async def test_a_proxy_without_a_usable_engine_is_not_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    clock, early = [0.0], [503] * 4
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)

    def status() -> int:
        """No longer well once both are ready; time flies then."""
        if not served.members[-1].is_ready:
            return early.pop() if early else 200
        clock[0] += supervisor.SILENT_SECONDS / 5
        return 503

    def say(text: str) -> None:
        assert not early  # before then neither is ready
        said.append(text)
        if "killing" in text:
            served.ask_to_end()

    async with one_that_says(status) as url:
        engine, proxy = (plan.Command(name, ["sleep", "60"], url) for name in ("engine", "proxy"))
        served = supervisor.Supervisor([engine], [proxy], tmp_path, say, lambda: None)
        assert await run(served) == 0
    assert [one.split()[0] for one in said if "killing" in one] == ["engine"]


async def test_without_a_proxy_nobody_is_served_and_serve_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(supervisor, "PAUSES", (0.0,))
    async with one_that_says(lambda: 200) as url:
        engine, proxy = (plan.Command(n, ["sleep", n], url) for n in ("60", "0.5"))
        served = supervisor.Supervisor([engine], [proxy], tmp_path, said.append, said.clear)
        assert await run(served) == 1
    assert said[-2:] == ["no proxy is left: stopping", "stopped"]


def test_a_slow_start_is_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    member = supervisor.Member(plan.Command("one", ["sleep", "60"], ""), tmp_path / "log", str)
    for _ in range(len(supervisor.PAUSES) + 1):
        assert not member.is_given_up
        member.step(None)
        clock[0] += 2 * supervisor.STEADY_SECONDS
        member.step(True)
        member.step(True)
        assert member.child is not None
        member.child.kill()
        member.step(None)
        clock[0] += max(supervisor.PAUSES)
    assert member.is_given_up


def test_a_later_start_that_hangs_is_ended_and_a_first_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    command = plan.Command("one", ["sleep", "60"], "")
    member = supervisor.Member(command, tmp_path / "log", said.append)
    for starts in range(2):
        member.step(None)
        clock[0] += 1000.0 + 1999.0 * starts
        member.step(False)
        assert "killing" not in "".join(said)
        if starts == 0:
            member.step(True)
            assert member.child is not None
            member.child.kill()
            member.step(None)
            clock[0] += max(supervisor.PAUSES)
    clock[0] += 2.0
    member.step(False)
    assert "has not answered for 3000 s: killing it" in said[-1]
    member.step(None)
    assert "restarting" in said[-1]


def test_stages_come_in_order() -> None:
    lines = [
        "INFO [api_utils.py:273] non-default args: {}",
        "INFO [gpu_model_runner.py:5091] Starting to load model x...",
        "INFO [monitor.py:53] torch.compile takes 12.1 s in total",
        "INFO [kv_cache_utils.py:1829] GPU KV cache size: 12 tokens",
        "INFO [gpu_model_runner.py:6215] Graph capturing finished in 3 secs",
        "INFO:     Application startup complete.",
    ]
    assert [stage_of(line) for line in lines] == list(range(len(STAGES)))
    assert stage_of("INFO something else") == -1
