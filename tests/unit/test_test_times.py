"""What `make test` says of itself at its end."""

from pathlib import Path

import test_times


def test_the_slowest_files_and_the_minutes_are_told_and_too_many_in_one_line(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.xml"
    cases = "".join(
        f'<testcase classname="tests.f{number}" time="{number / 2}"/>' for number in range(12)
    )
    report.write_text(f"<testsuites><testsuite>{cases}{cases}</testsuite></testsuites>")
    files = test_times.seconds_by_file([report, tmp_path / "of a run that broke off"])
    told = test_times.lines(420.0, files)
    assert [line.split() for line in told[:2]] == [
        ["11.0", "s", "tests.f11"],
        ["10.0", "s", "tests.f10"],
    ]
    assert told[10:] == ["make test took 7 min 00 s; above are its slowest files"]
    assert test_times.lines(421.0, files)[11].startswith("that is more than 7 min 00 s")
