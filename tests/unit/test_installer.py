"""How the environment's packages are installed: uv with pip's settings, pip where uv cannot."""

from pathlib import Path

import installer
import pytest

SETTINGS = """\
:env:.find-links='/wheels'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
global.find-links='/a /b'
global.index-url='https://index.invalid/simple'
global.timeout='60'
install.no-warn-script-location='true'
"""
PROGRAM = """#!/bin/sh
echo "$*" >> {log}
case "$*" in *"{failing}"*) echo "no such thing" >&2; exit 3;; esac
"""


def test_uv_is_told_where_pip_takes_packages_from() -> None:
    told = installer.uv_environment(SETTINGS)
    assert told == {
        **installer.LIKE_PIP,
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_DEFAULT_INDEX": "https://index.invalid/simple",
        "UV_HTTP_TIMEOUT": "60",
    }
    assert installer.uv_environment("") == installer.LIKE_PIP
    assert installer.uv_environment("global.find-links='/a /b'")["UV_FIND_LINKS"] == "/a,/b"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder whose `python` writes down what it is asked for; what `failing` names fails."""
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(environment: Path, failing: str) -> Path:
    log = environment / "log"
    python = environment / "bin" / "python"
    python.write_text(PROGRAM.format(log=log, failing=failing))
    python.chmod(0o755)
    return log


def test_pip_installs_where_uv_cannot(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = program(environment, failing="-m uv")
    installer.install(environment, "--no-deps", "something==1")
    said = log.read_text().splitlines()
    assert said[0].endswith(f"uv=={installer.UV}")
    assert "-m uv pip install" in said[-2]
    assert said[-1].startswith("-m pip install")
    assert said[-1].endswith("--no-deps something==1")
    assert "no such thing" in capsys.readouterr().err
