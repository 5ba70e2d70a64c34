"""The structures that kernels take, read from the CUDA sources that declare them."""

import ctypes
import functools
import re
from typing import Any

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu.nvrtc import SOURCES

_POINTER = ctypes.c_uint64
_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "float": ctypes.c_float}
_MEMBER = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\w+)\])?;")


@functools.cache
def arguments_type(source: str, **macros: int) -> type[ctypes.Structure]:
    """Return ``struct Args`` of a file in `nvrtc.SOURCES` as a ctypes structure; a pointer is an
    address of 64 bits.

    Args:
        source: name of the file.
        macros: values of the macros that array lengths name.

    Raises:
        UnsupportedError: the file has no such structure, or a member of another form.
    """
    return _structure(source, (SOURCES / source).read_text(), "Args", macros)


def _structure(source: str, text: str, name: str, macros: dict[str, int]) -> type[Any]:
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise UnsupportedError(f"expected `struct {name}` in {source}, found none")
    fields = []
    for line in found[1].splitlines():
        member = _MEMBER.match(line.strip())
        if member is None:
            raise UnsupportedError(f"expected a member of `struct {name}` in {source}, got {line}")
        kind, pointer, field, length = member.groups()
        made: Any = _POINTER if pointer else _TYPES.get(kind)
        made = made or _structure(source, text, kind, macros)
        fields.append((field, made * macros[length] if length else made))
    return type(name, (ctypes.Structure,), {"_fields_": fields})
