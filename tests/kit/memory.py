"""What this process holds in memory, without what its allocators keep for later."""

import ctypes


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap_bytes() -> int:
    """Bytes of the C heap in use; ``sys.getallocatedblocks`` has the interpreter's small ones."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return found.uordblks + found.hblkhd
