"""What `auto` means for the native ring's capabilities: where it is on, and each reason for off."""

import platform
import sys
from types import SimpleNamespace

import pytest
import vllm.platforms

from vllm_commext import plugin, status
from vllm_commext.compat import fits
from vllm_commext.errors import UnprovenHereError
from vllm_commext.status import State

NAMES = ("shm_queue", "cpu_collectives")


@pytest.fixture(autouse=True)
def _proven(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(fits.RING, reason="the extension is not built")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimpleNamespace(is_cpu=lambda: False, device_name="cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", gpus)


def on_riscv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")


def without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fits.RING, None)


ELSEWHERE = [
    (on_a_gpu, "proven with vLLM for CPUs, and this is for cuda"),
    (on_riscv, "proven on x86_64, aarch64, and this is riscv64"),
    (without_the_extension, "the native extension is not built"),
]


@pytest.mark.parametrize(
    ("elsewhere", "reason"), ELSEWHERE, ids=lambda at: at.__name__ if callable(at) else ""
)
def test_elsewhere_it_is_off_by_default_and_no_warning_is_given(
    elsewhere: object,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    elsewhere(monkeypatch)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UnprovenHereError, match=reason):
        fits.require_proven_machine()
    wanted = [one for one in plugin.CAPABILITIES if one.name in NAMES]
    monkeypatch.setattr(plugin, "CAPABILITIES", wanted)
    monkeypatch.setenv("VLLM_COMMEXT_STRICT", "1")
    plugin.register()
    for name in NAMES:
        found = status.find(name)
        assert found.state is State.OFF
        assert found.reason.startswith(f"VLLM_COMMEXT_{name.upper()}=auto: {reason}")
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
