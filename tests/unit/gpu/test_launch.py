"""Loading a kernel in a thread that has not worked on the GPU yet."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import Device

INVALID_CONTEXT = 201


class Driver:
    """As CUDA's: nothing is loaded without a context."""

    def __init__(self, context: int) -> None:
        self.context, self.retained = context, list[int]()

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        self.retained.append(device)
        return 0, 100 + device

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self.context = context
        return (0,)

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, ...]:
        return (0, 7) if self.context else (INVALID_CONTEXT, 0)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, int]:
        return 0, 8

    def cuFuncLoad(self, function: int) -> tuple[int]:
        return (0,)


@pytest.mark.parametrize(("context", "left"), [(0, 103), (55, 55)])
def test_a_thread_without_a_context_gets_that_of_its_gpu(
    context: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(context)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(launch, "_configuration", lambda *_: None)
    program: Any = SimpleNamespace(name="any", load_or_compile=lambda *_: b"")
    made = launch.load(program, {}, 32, Device(3, 90, 132), programmatic=False)
    assert made.function == 8
    assert driver.context == left
    assert driver.retained == ([] if context else [3])
