"""Counts this process's calls of the driver's multicast functions, through CUPTI's callbacks."""

import ctypes
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

DRIVER_API = 1  # CUPTI_CB_DOMAIN_DRIVER_API
MAX_FUNCTIONS = 3000
PREFIX = "cuMulticast"
_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int)
)


def find_cupti() -> str:
    """The library that came with torch, or an empty string."""
    spec = importlib.util.find_spec("nvidia")
    for folder in list(spec.submodule_search_locations or ()) if spec else []:
        for found in sorted(Path(folder).glob("*/lib/libcupti.so*")):
            return str(found)
    return ""


class MulticastCalls:
    """Counts from its creation on, by function; one at a time in a process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._cupti = ctypes.CDLL(find_cupti() or "libcupti.so")
        self._names = self._functions()
        if not self._names:
            raise RuntimeError("expected CUPTI to know multicast functions, it knows none")
        self._callback = _Callback(self._called)
        self._subscriber = ctypes.c_void_p()
        self._check(
            "cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, ctypes.c_void_p()
        )
        for number in self._names:
            self._check("cuptiEnableCallback", 1, self._subscriber, DRIVER_API, number)

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._cupti, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} returned {status}")

    def _functions(self) -> dict[int, str]:
        """By CUPTI's number, the driver's functions whose names begin so."""
        found: dict[int, str] = {}
        for number in range(1, MAX_FUNCTIONS):
            name = ctypes.c_char_p()
            status = self._cupti.cuptiGetCallbackName(DRIVER_API, number, ctypes.byref(name))
            if status == 0 and name.value and name.value.decode().startswith(PREFIX):
                found[number] = name.value.decode()
        return found

    def _called(self, _: Any, __: int, number: int, site: Any) -> None:
        if site[0] == 0:  # on entering the function
            self.counts[self._names[number]] += 1

    def control(self) -> None:
        """Ask for a granularity, the one multicast function that creates and changes nothing."""

        class Properties(ctypes.Structure):
            _fields_ = (
                ("devices", ctypes.c_uint),
                ("size", ctypes.c_size_t),
                ("handle_types", ctypes.c_ulonglong),
                ("flags", ctypes.c_ulonglong),
            )

        wanted = Properties(2, 1 << 21, 1, 0)
        granularity = ctypes.c_size_t()
        ctypes.CDLL("libcuda.so.1").cuMulticastGetGranularity(
            ctypes.byref(granularity), ctypes.byref(wanted), 0
        )
