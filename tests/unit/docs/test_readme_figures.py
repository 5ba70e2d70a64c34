"""README.md and docs/performance.md are what the result files and the code say."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_commext.compat.monkey_patch import INVENTORY
from vllm_commext.compat.versions import WINDOW
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.settings import TOGGLES

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(README.split())
PERFORMANCE = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
DEFECTS = ROOT / "tests" / "cpu" / "test_defects.py"
MAX_LINES, MAX_COLUMNS, MAX_TABLE_COLUMNS = 130, 120, 160
CONNECTOR = ConnectorConfig(side_channel_host="", side_channel_port=0)


def tool(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    return tool("readme_rows")


def test_the_tables_and_the_picture_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "readme_figures.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"run python tools/readme_figures.py: {done.stdout}{done.stderr}"


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS and line[0] not in "|!"] == []
    assert [line for line in lines if len(line) > MAX_TABLE_COLUMNS] == []


def handover() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """What the first run says of itself, and its rows by prompt length and engine."""
    run = tool("readme_figures").load(tool("readme_figures").FIRST)
    rows = {(row["tokens"], row["engine"]): row for row in run["rows"] if row["at once"] == 1}
    return run["about"], rows


def test_what_the_prose_says_of_added_latency_is_what_was_measured() -> None:
    picture, (about, rows) = tool("readme_picture"), handover()
    theirs, alike, proxy = (
        f"{picture.added(list(rows.values()), 'second token', 8000, engine)[0]:.0f}"
        for engine in picture.ENGINES
    )
    prompt = "After 8,000 tokens the second token comes this much later than from one server:"
    said = f"`NixlConnector` {theirs} ms, ours {alike} (both: prefill, then decode), {proxy} behind"
    assert f"{prompt} {said} our proxy, which asks both at once (8B shape" in PROSE
    assert f"second token, 8,000 tokens: {theirs}, {alike}, behind our proxy {proxy}]" in PROSE
    vllm = re.search(r"vLLM (\d+\.\d+)\.", about["versions"])
    assert vllm
    assert f"Two H100, vLLM {vllm[1]}, an 8B-shaped model" in PROSE
    (chunk,) = re.findall(r"--max-num-batched-tokens \d+", about["command"])
    assert '"mode":0' in about["command"]
    for page in (PROSE, PERFORMANCE):
        assert f"`{chunk}`" in page
        assert "`torch.compile` off" in page


def test_what_the_prose_says_of_rounds_is_what_was_measured() -> None:
    _, rows = handover()
    rounds = [len(rows[tokens, "plain"]["rounds"]) for tokens in (1000, 8000)]
    assert f"medians of {rounds[0]} rounds at 1,000 tokens and {rounds[1]} at 8,000" in PROSE
    theirs, ours = (
        f"{min(firsts):.0f} to {max(firsts):.0f}"
        for engine in ("vLLM's", "ours, proxy, streamed")
        for firsts in [[one["first token"] for one in rows[8000, engine]["rounds"]]]
    )
    assert f"(its first token {theirs} ms at 8,000 tokens; ours {ours})" in PERFORMANCE
    more = [
        f"{rows[tokens, 'ours']['first token'] - rows[tokens, 'plain']['first token']:.1f}"
        for tokens in (1000, 8000)
    ]
    assert f"ours adds {' and '.join(more)} ms to the first token" in PERFORMANCE


def test_what_the_prose_says_of_goodput_is_what_was_measured() -> None:
    figures, evidence = tool("readme_figures"), tool("readme_evidence")
    runs = [figures.load(name)["rows"] for name in figures.GOODPUT]
    spread = max(
        100 * (max(row["good"][limit]) - min(row["good"][limit])) * row["rounds"] / row["requests"]
        for rows in runs
        for row in rows
        for limit in evidence.LIMITS
    )
    assert f"up to {spread:.0f} points apart" in PROSE
    assert {(row["rounds"], row["workload"]) for rows in runs for row in rows} == {(2, "mixed")}
    assert "Prompts of 4,000 tokens, answers of 160, two rounds a cell" in PROSE


def test_what_the_prose_says_of_a_token_beside_their_connector_is_what_was_measured() -> None:
    run = tool("readme_figures").load(tool("readme_figures").GOODPUT[0])["rows"]
    theirs, ours = (
        " and ".join(f"{1000 * row['tpot'][0]:.1f}" for row in run if row["way"] == way)
        for way in ("nixl", "fixed")
    )
    assert f"took {theirs} ms a token in the median, ours {ours}, probably" in PROSE
    _, rows = handover()
    post = rows[8000, "vLLM's"]["post"]
    assert f"on the engine's thread ({post:.0f} ms for 8,000 tokens)" in PROSE


def test_what_the_prose_says_of_splitting_is_what_the_table_says() -> None:
    assert "fixed roles kept 10 ms a token most often, adaptive placement 15 ms" in PROSE
    assert "at 25 ms replicas did as well as adaptive" in PROSE
    rows = re.findall(r"^\| (\d+) ms a token, .* \| (.+) \| .+ \| (.+) \| (.+) \|$", README, re.M)
    assert len(rows) == 6
    for limit, *ways in rows:
        cells = zip(*(map(int, re.findall(r"\d+", way)) for way in ways), strict=True)
        for replicas, fixed, adaptive in cells:
            if limit == "25":
                assert abs(replicas - adaptive) <= 3
            else:
                assert max(replicas, fixed, adaptive) == (fixed if limit == "10" else adaptive)


def test_the_highest_rates_that_the_prose_names_are_those_of_the_run() -> None:
    """Between the rates that were run, on a straight line."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in tool("readme_figures").load("2026-11-27_goodput_rates")["rows"]:
        (good,) = row["good"]["15 ms, 1000 ms"]
        found.setdefault(row["way"], []).append((row["rate"], 100 * good / row["requests"]))

    def highest(way: str) -> float:
        curve = sorted(found[way])
        for (slow, before), (fast, after) in itertools.pairwise(curve):
            if before >= 90 > after:
                return slow + (before - 90) / (before - after) * (fast - slow)
        return curve[-1][0]

    replicas, fixed, adaptive = map(highest, ("replicas", "fixed", "adaptive 15/1000"))
    assert f"up to {replicas:.1f} requests/s as replicas, {fixed:.1f} with fixed roles" in PROSE
    assert f"at least {adaptive:.1f} adaptively" in PROSE


def test_the_loss_that_the_prose_names_is_that_of_the_run() -> None:
    row = re.search(r"\(b\), first token \| (\d+) ms \| (\d+) ms \|", PERFORMANCE)
    assert row
    assert f"first token took {row[2]} ms, `NixlConnector`'s {row[1]}." in PROSE


def test_a_goodput_row_counts_all_rounds() -> None:
    evidence = tool("readme_evidence")

    def row(way: str, rate: float, *good: int) -> dict[str, object]:
        limits = dict.fromkeys(evidence.LIMITS, good)
        return {"rate": rate, "requests": 200, "way": way, "good": limits}

    made = [row("replicas", 8.0, 50, 60), row("replicas", 9.0, 10, 10), row("fixed", 8.0, 90, 0)]
    made += [row("adaptive 15/1000", rate, 90, 95) for rate in (9.0, 8.0)]
    table = evidence.goodput({"rows": [*made, row("adaptive 10/1000", 8.0, 0, 0)]})
    assert table.splitlines()[2:] == [
        f"| {each} ms a token, 8; 9 requests/s, run 1 | 55; 10 % | - | 45; - % | 92; 92 % |"
        for each in (10, 15, 25)
    ]


def test_a_loss_is_shown_as_one(rows: ModuleType) -> None:
    results = {
        "rows": [
            {"tokens": 8000, "at once": 1, "engine": "vLLM's", "TPOT": 4.0},
            {"tokens": 8000, "at once": 1, "engine": "ours", "TPOT": 5.0},
            {"tokens": 8000, "at once": 8, "engine": "ours", "TPOT": 1.0},
        ]
    }
    row = rows.Row("x", "file", "here", "ms", rows.handover("TPOT", (8000,)))
    assert row.cells(results) == ("4.00 ms", "5.00 ms", "0.80x")


def test_the_speedup_of_servers_is_that_of_the_rounds(rows: ModuleType) -> None:
    one = {"cell": "a", "figure": "throughput", "off": 1000.0, "on": 1100.0, "ratios": [0.97]}
    row = rows.Row("x", "file", "here", "", rows.serve("throughput", "a"))
    assert row.cells({"rows": [one]}) == ("1,000", "1,100", "0.97x")


def test_queue_rows_take_medians_of_one_reader_alone(rows: ModuleType) -> None:
    def cell(who: str, value: float, n_readers: int = 1) -> dict[str, object]:
        shared = {"case": "x", "placement": "free", "unit": "us p50"}
        return {**shared, "variant": who, "value": value, "n_readers": n_readers}

    cells = [cell("vllm", 30.0), cell("vllm", 20.0), cell("vllm", 10.0), cell("ours", 10.0)]
    cells.append(cell("ours", 1000.0, n_readers=4))
    row = rows.Row("x", "file", "here", "us", rows.queue("x"))
    assert row.cells({"cells": cells}) == ("20.0 us", "10.0 us", "2.00x")


def test_the_speedup_of_collectives_is_that_of_the_rounds(rows: ModuleType) -> None:
    figures = {"gloo": (10.0, 20.0, 90.0), "ours": (10.0, 10.0, 30.0)}
    cells = [
        {"num_ranks": 2, "num_bytes": 8, "number": n, "variant": who, "median_us": value}
        for who, values in figures.items()
        for n, value in enumerate(values)
    ]
    row = rows.Row("x", "file", "here", "us", rows.collectives(2, 8))
    assert row.cells({"cells": cells}) == ("20.0 us", "10.0 us", "2.00x")
    figures["ours"] = (10.0, 40.0, 30.0)
    for cell in cells[3:]:
        cell["median_us"] = figures["ours"][cell["number"]]
    assert row.cells({"cells": cells}) == ("20.0 us", "30.0 us", "1.00x")


def test_the_readme_counts_the_monkey_patched_symbols() -> None:
    """`tests/contract/test_plugin.py` holds the defaults against a registration."""
    assert all(row.symbol.startswith("vllm.") for row in INVENTORY)
    named = re.search(
        r"monkey-patches (\d+) symbols .* GPUs (\d+) of the .* "
        r"up to (\d+) where .*, and (\d+) more",
        PROSE,
    )
    assert named
    with_kernels = ("tests/contract/test_fused_pass.py", "tests/contract/test_fused_eager.py")
    with_connector = ("tests/contract/test_engine_wait.py", "tests/contract/test_resets.py")
    of_all_reduce = int(named[2]) + int(named[3])
    assert f"`VLLM_COMMEXT_ALLREDUCE=0` leaves these {of_all_reduce} out" in PROSE
    assert [int(number) for number in named.groups()] == [
        len(INVENTORY),
        sum("CudaCommunicator." in row.symbol for row in INVENTORY),
        sum(row.test in with_kernels for row in INVENTORY),
        sum(row.test in with_connector for row in INVENTORY),
    ]


def test_the_readmes_defaults_are_those_of_the_code() -> None:
    defaults = {toggle.name: toggle.default for toggle in TOGGLES}
    named = dict(re.findall(r"^\|[^|]+\| `(VLLM_COMMEXT_\w+)` \| (\w+) \|", README, re.MULTILINE))
    assert named == {name: defaults[name] for name in named}
    parts = {"NIXL", "ALLREDUCE", "SHM_QUEUE", "CPU_COLLECTIVES", "REDUCE_RMS"}
    assert set(named) == {f"VLLM_COMMEXT_{part}" for part in parts}
    lease = f"until {CONNECTOR.kv_lease_duration:g} s after the decode engine's last heartbeat"
    assert lease in PROSE


def test_the_readmes_versions_are_those_that_are_tested() -> None:
    def newest_first(layer: str) -> str:
        *rest, last = [row.minor for row in reversed(WINDOW) if getattr(row, layer)]
        return f"{', '.join(rest)} and {last}"

    said = f"vLLM {newest_first('gpus')} on GPUs; {newest_first('servers')} on CPUs"
    assert said in PROSE
    environment = tool("cpu_env")
    makefile = (ROOT / "Makefile").read_text()
    vllm = re.search(r"^VLLM \?= (\d+\.\d+)", makefile, re.MULTILINE)
    assert vllm
    assert f"(vLLM {vllm[1]}'s Python files on the compiled parts of CPU vLLM " in PROSE
    assert f"CPU build; NIXL {environment.NIXL})" in PROSE
    assert f"nixl=={environment.NIXL}" in README
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    assert re.findall(r"Python (\d+\.\d+)", PROSE) == [python] * 2


def test_each_fault_has_its_row_and_each_row_its_test() -> None:
    anchors = re.findall(r"^\| \[[^]]+\]\(docs/failures\.md#([\w-]+)\)", README, re.MULTILINE)
    named = re.findall(r'^\| <a id="([\w-]+)"></a>.*\| `(test_\w+)` \|$', FAILURES, re.MULTILINE)
    assert anchors == [anchor for anchor, _ in named]
    tests = {
        node.name
        for node in ast.walk(ast.parse(DEFECTS.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert {test for _, test in named} == tests
    page = (ROOT / "benchmarks" / "results" / "connector_defects.md").read_text()
    vllm = re.search(r"^vLLM (\d+\.\d+)\.\d+ on CPUs", page, re.MULTILINE)
    assert vllm
    assert f"| vLLM {vllm[1]}'s `NixlConnector` |" in README
    answer = re.search(r"^ANSWER_SECONDS = ([\d.]+)$", DEFECTS.read_text(), re.MULTILINE)
    assert answer
    assert f"no answer in {float(answer[1]):g} s" in README
    limits = re.findall(r"(?:lease|`handshake_timeout`) (\d+) s", page)
    assert set(limits) == {"4"}
    assert f"servers on CPUs; lease, time limits: {limits[0]} s" in README
    assert f"error at `transfer_timeout`; default {CONNECTOR.transfer_timeout:g} s |" in README
    assert f"{len(tests)} passed" in page
    assert f"{len(tests)} failed" in page


def test_the_chaos_figures_are_those_of_the_run() -> None:
    named = re.search(r"of ([\d,]+) requests \[(\d+) got an error", PROSE)
    assert named
    requests, errors = named.groups()
    assert f"of {requests} requests were answered right and {errors} got an error" in " ".join(
        FAILURES.split()
    )
    page = (ROOT / "benchmarks" / "results" / "chaos.md").read_text()
    section = page.partition('<a id="2026-11-24_chaos"></a>')[2].partition("<a id=")[0]
    assert f"- {requests.replace(',', '')} requests: " in section
    faults = re.search(r"^## Chaos run, (\d+) faults", section, re.MULTILINE)
    assert faults
    assert f"load and {faults[1]} seeded faults" in PROSE
    assert f" {errors} error, 0 late, 0 wrong" in section
