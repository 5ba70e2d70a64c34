"""Files that only this user can have written: what was written is read, all else counts as none."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext import private_files

CONTENT = b"a kernel" * 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "file"


def test_what_was_written_is_read(path: Path) -> None:
    assert private_files.read(path) is None
    for content in (CONTENT, b"", b"x" * 100_000):
        private_files.write(path, content)
        assert private_files.read(path) == content
    assert [one.name for one in path.parent.iterdir()] == ["file"]


@given(st.integers(0, 1000), st.integers(0, 255), st.booleans())
@settings(max_examples=200)
def test_what_was_altered_or_cut_is_none(place: int, byte: int, is_cut: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        alter(Path(folder) / "file", place, byte, is_cut)


def alter(file: Path, place: int, byte: int, is_cut: bool) -> None:
    private_files.write(file, CONTENT)
    whole = file.read_bytes()
    place %= len(whole)
    changed = whole[:place] + (b"" if is_cut else bytes([byte]) + whole[place + 1 :])
    file.write_bytes(changed)
    assert private_files.read(file) == (CONTENT if changed == whole else None)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o772, 0o720])
def test_a_folder_that_others_can_write_holds_nothing(path: Path, mode: int) -> None:
    private_files.write(path, CONTENT)
    path.parent.chmod(mode)
    assert private_files.read(path) is None
    assert not private_files.is_there(path)
    for act in (lambda: private_files.write(path, b""), lambda: private_files.make(path)):
        with pytest.raises(OSError, match="not writable by others"):
            act()
    path.parent.chmod(0o755)
    assert private_files.read(path) == CONTENT


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "group", "others"])
def test_what_is_no_file_of_ours_is_none(path: Path, kind: str) -> None:
    private_files.write(path, CONTENT)
    kept = path.with_name("kept")
    path.rename(kept)
    if kind in ("link", "dangling"):
        path.symlink_to(kept if kind == "link" else "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(kept.read_bytes())
        path.chmod(0o664 if kind == "group" else 0o646)
    assert private_files.read(path) is None
    assert not private_files.is_there(path)
    assert kept.read_bytes().endswith(CONTENT)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root can")
def test_what_another_user_has_planted_is_none() -> None:
    """For a third user, as files of root count for everybody."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        Path(shared).chmod(0o777)
        plant_and_look(shared)


def plant_and_look(shared: str) -> None:
    def act(user: int, call: str) -> str:
        code = (
            f"import os; from pathlib import Path; from vllm_commext import private_files as own\n"
            f"os.setgroups([]); os.setgid({user}); os.setuid({user}); os.umask(0o022)\n"
            f"path = Path({shared!r}) / 'folder' / 'file'\nprint({call})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    act(65534, "own.write(path, b'planted'), own.make(path.with_name('drain'))")
    assert act(65534, "own.read(path)") == "b'planted'"
    assert act(4242, "own.read(path)") == "None"
    assert act(4242, "own.is_there(path.with_name('drain'))") == "False"
    assert "PermissionError" in act(4242, "own.write(path, b'own')")


def test_a_reader_beside_writers_finds_one_whole_content(path: Path) -> None:
    contents = [bytes([65 + number]) * 200_000 for number in range(4)]
    private_files.write(path, contents[0])
    writers = [
        threading.Thread(target=lambda c=content: [private_files.write(path, c) for _ in range(20)])
        for content in contents
    ]
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        assert private_files.read(path) in contents
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_files.write(path, CONTENT)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(private_files.os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            private_files.write(path, b"new")
    assert private_files.read(path) == CONTENT
    assert [one.name for one in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("environ", [{}, {"XDG_CACHE_HOME": ""}])
def test_without_a_home_there_is_no_cache(environ: dict[str, str]) -> None:
    """A random user id, as OpenShift gives: no HOME, and no entry in the list of users."""
    code = (
        "import os; from vllm_commext import private_files\n"
        "os.environ.pop('HOME', None); os.setuid(1234567) if os.getuid() == 0 else 0\n"
        f"os.environ.pop('XDG_CACHE_HOME', None); os.environ.update({environ})\n"
        "print([private_files.cache_folder('allreduce') for _ in range(2)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if os.getuid() == 0:
        assert done.stdout.strip() == "[None, None]"
        assert done.stderr.count("set HOME or XDG_CACHE_HOME") == 1
