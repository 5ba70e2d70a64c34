"""Kernels' structures as read from their sources; each emulation compares the size with what a
compiler makes of the same source."""

import ctypes
from pathlib import Path

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.launch import arguments_type
from vllm_commext.nixl.transport.gather import MAX_RUNS, make_arguments


def test_members_keep_their_order_and_types() -> None:
    kind = arguments_type(ipc.PEER_CHECK_ARGUMENTS, WORLD_SIZE=3)
    assert [name for name, *_ in kind._fields_] == ["answer", "timeout_ns", "memory"]
    assert len(kind().memory) == 3
    assert dict(arguments_type("reduce_rms.cu")._fields_)["eps"] is ctypes.c_float


def test_a_structure_in_a_structure_is_read_too() -> None:
    made = make_arguments()
    made.runs[1] = (1, 2, 3, 4)
    assert len(made.runs) == MAX_RUNS
    assert (made.runs[1].end, made.runs[1].bytes) == (1, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found none"),
        ("struct Args {\n  u32 a, b;\n};", "u32 a, b"),
        ("struct Args {\n  short a;\n};", "struct short"),
        ("struct Args {\n  u32 a : 3;\n};", "u32 a : 3"),
    ],
)
def test_what_cannot_be_read_is_named(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.cu").write_text(text)
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    arguments_type.cache_clear()
    with pytest.raises(UnsupportedError, match=message):
        arguments_type("broken.cu")
