"""`vllm-commext bench` against servers of one process: table, verdict, file, exit status."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web

from tests.unit.bench.test_client import PART, Handler, event, server, stream
from vllm_commext.cli.main import main

FAILS_EVERY = {"good": 1 << 30, "flaky": 3, "broken": 1}


def failing(every: int) -> Handler:
    numbers = count(1)

    async def answer(request: web.Request) -> web.StreamResponse:
        if next(numbers) % every == 0:
            raise web.HTTPServiceUnavailable(text="full")
        parts = [event(PART)] * (await request.json())["max_tokens"]
        return await stream(request, *parts, b"data: [DONE]\n\n")

    return answer


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()

    async def start() -> dict[str, str]:
        return {
            name: await stack.enter_async_context(server(failing(every)))
            for name, every in FAILS_EVERY.items()
        }

    found = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield found
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.mark.parametrize(
    ("names", "status", "said"),
    [
        (("flaky", "good"), 0, "B serves 1.5"),
        (("good", "flaky"), 1, "not worth it; 1"),
        (("good", "good"), 0, "both serve all but 0 of"),
        (("good",), 0, "100.0%"),
    ],
)
def test_the_table_ends_with_a_verdict(
    names: tuple[str, ...],
    status: int,
    said: str,
    urls: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "found.json"
    options = ["--rate", "40", "--seconds", "0.5", "--rounds", "2", "--warm-up", "0.1"]
    options += ["--wait", "20", "--scale", "0.02", "--tpot-ms", "20000", "--ttft-ms", "20000"]
    options += ["--json", str(file), "--export-trace", str(tmp_path / "trace")]
    for name in names:
        options += ["--endpoint", urls[name]]
    assert main(["bench", *options]) == status
    text = capsys.readouterr().out
    assert said in text
    assert "| A | " in text
    found = json.loads(file.read_text())
    assert [len(one["rounds"]) for one in found["endpoints"]] == [2] * len(names)
    assert len(found["verdicts"]) == len(names) - 1
    lines = (tmp_path / "trace").read_text().splitlines()
    assert f"--dataset-path {tmp_path / 'trace'} --num-prompts {len(lines)} " in text


def test_a_server_that_only_fails_is_an_error(
    urls: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--seconds", "1", "--scale", "0.02"]
    assert main(["bench", "--endpoint", urls["broken"], *options]) == 2
    assert "failed, the first with: HTTP 503: full" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/v1/models: expected" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--export-trace"])
@pytest.mark.parametrize("name", ["", "missing/file", "file/below"])
def test_a_file_that_cannot_be_written_is_an_error_before_the_run(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch(0o755)
    path = tmp_path / name
    assert main(["bench", "--endpoint", "http://127.0.0.1:9", option, str(path)]) == 2
    told = f"{option} {path}: expected a file that can be written"
    assert told in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
