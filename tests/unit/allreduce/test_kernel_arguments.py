"""What a kernel is given has the fields of its source's struct, in their order, and their bytes."""

import ctypes
from collections.abc import Callable

import pytest

from vllm_commext.allreduce.backends import host, push
from vllm_commext.allreduce.fused import kernels as fused
from vllm_commext.gpu import nvrtc, peer_check


@pytest.mark.parametrize(
    ("source", "arguments_type", "num_bytes"),
    [
        ("push_args.h", push.arguments_type, 8 * 5 + 8 * 4),
        ("fused_rows.h", fused.arguments_type, 8 * 7 + 16 + 8 * 5 + 8 * 4),
        ("host_parts.h", host.arguments_type, 8 * 3 + 4 * 6 + 8 + 8 * 4),
        ("peer_check.cu", peer_check.arguments_type, 8 * 2 + 8 * 4),
    ],
)
def test_the_kernels_arguments_are_as_the_source_has_them(
    source: str, arguments_type: Callable[[int], type[ctypes.Structure]], num_bytes: int
) -> None:
    body = (nvrtc.SOURCES / source).read_text().partition("struct Args {")[2].partition("};")[0]
    lines = body.strip().splitlines()
    names = [line.split("//")[0].rstrip(" ;\n").split()[-1].partition("[")[0] for line in lines]
    kind = arguments_type(4)
    assert names == [name for name, *_ in kind._fields_]
    assert ctypes.sizeof(kind) == num_bytes
