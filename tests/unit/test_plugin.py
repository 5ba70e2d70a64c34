"""What `register` decides, without vLLM; with it: tests/contract/test_plugin.py.

vLLM is taken out of reach, so that these tests say the same whether or not it is installed."""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.processes import run
from vllm_commext import UnsupportedError, plugin, status
from vllm_commext.compat import fits, hooks, parts
from vllm_commext.compat.fits import Verdict
from vllm_commext.compat.parts import Part
from vllm_commext.plugin import Capability
from vllm_commext.status import State

Offer = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Registers one capability, under nixl's toggle, with a vLLM of a given version; its calls."""

    def offer(
        problem: Exception | None = None,
        version: str = "0.32.0",
        found: Verdict = Verdict.TESTED,
        is_gone: bool = False,
        self_test: Callable[[], None] = lambda: None,
    ) -> list[str]:
        calls: list[str] = []

        def activate() -> None:
            calls.append("activate")
            if problem is not None:
                raise problem

        capability = Capability("nixl", activate, lambda: calls.append("refuse"), "the fallback")
        monkeypatch.setattr(plugin, "CAPABILITIES", (capability,))
        monkeypatch.setattr(hooks, "vllm_version", lambda: version)
        differing = [] if found is Verdict.SAME else ["vllm.some:Thing.method"]
        monkeypatch.setattr(fits, "compare", lambda *args: ("0.33", differing))
        monkeypatch.setattr(fits, "vllm_root", Path)
        monkeypatch.setattr(fits, "digest", lambda *_: "" if is_gone else "other")
        part = Part("nixl", "nixl", "self_test")
        monkeypatch.setattr(
            parts, "known_sources", lambda: {"nixl": {"vllm.some:Thing.method": {}}}
        )
        monkeypatch.setattr(fits, "PARTS", (part,))
        monkeypatch.setattr(fits, "BY_NAME", {"nixl": part})
        tests = SimpleNamespace(self_test=self_test)
        monkeypatch.setitem(sys.modules, "vllm_commext.compat.self_tests", tests)
        plugin.register()
        return calls

    return offer


def outcome() -> status.CapabilityStatus:
    found = status.find("nixl")
    assert found is not None
    return found


def test_without_vllm_it_is_refused_and_nothing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    assert outcome().state is State.REFUSED
    assert outcome().reason == "vLLM is not installed"
    assert "commext: nixl refused (vLLM is not installed; vLLM's own" in caplog.text


def test_an_active_capability_is_told_and_a_second_call_does_and_says_nothing(
    offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.commext")
    calls = offer()
    assert "commext: nixl active" in caplog.messages
    caplog.clear()
    plugin.register()
    assert calls == ["activate"]
    assert caplog.messages == []


@pytest.mark.parametrize("problem", [UnsupportedError("no NIXL"), OSError("no NIXL"), KeyError(1)])
def test_whatever_a_capability_raises_is_a_refusal(offer: Offer, problem: Exception) -> None:
    assert offer(problem) == ["activate", "refuse"]
    assert outcome().state is State.REFUSED
    assert str(problem) in outcome().reason
    assert not outcome().required


def test_asked_for_with_1_a_refusal_is_an_error(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_NIXL", "1")
    offer(UnsupportedError("no NIXL"))
    assert outcome().required


@pytest.mark.parametrize("name", ["VLLM_COMMEXT", "VLLM_COMMEXT_NIXL"])
def test_a_toggle_at_0_is_off(offer: Offer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv("VLLM_COMMEXT_STRICT", "1")
    assert offer(UnsupportedError("no NIXL")) == []
    assert outcome().line() == f"commext: nixl off ({name}=0)"


def test_an_older_vllm_is_refused_before_anything_is_touched(offer: Offer) -> None:
    assert offer(version="0.31.1") == ["refuse"]
    assert "0.31.1 is older than the window" in outcome().reason


def fail() -> None:
    raise RuntimeError("it does something else")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    return [line for line in warnings if "could not register VLLM_COMMEXT_" not in line]


@pytest.mark.parametrize("version", ["0.33.1", "0.34.0", "0.40.0", "dev"])
def test_the_same_source_runs_whatever_the_version_is_called(
    offer: Offer, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.commext")
    assert offer(version=version, found=Verdict.SAME) == ["activate"]
    assert outcome().line() == "commext: nixl active (same source: as in vLLM 0.33)"
    said = f"no test was run on vLLM {version}; same source as in one that was tested: nixl"
    assert f"commext: {said}" in caplog.messages
    assert told(caplog) == []


def test_what_differs_and_passes_its_test_runs_and_is_one_warning(
    offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    assert offer(version="0.34.0", found=Verdict.DIFFERS) == ["activate"]
    assert outcome().line().startswith("commext: nixl active (self-tested: Thing.method not as in")
    [line] = told(caplog)
    assert line.endswith("as functions differ: nixl (Thing.method not as in vLLM 0.33)")


def test_only_the_servers_first_process_warns(
    offer: Offer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the server")
    offer(version="0.34.0", found=Verdict.DIFFERS)
    assert told(caplog) == []


def test_what_differs_and_fails_its_test_stays_out_and_names_the_function(offer: Offer) -> None:
    assert offer(version="0.34.0", found=Verdict.DIFFERS, self_test=fail) == ["refuse"]
    assert "Thing.method not as in vLLM 0.33, and its test fails" in outcome().reason
    assert "it does something else" in outcome().reason


@pytest.mark.parametrize(
    ("choice", "found", "runs"),
    [
        ("off", Verdict.SAME, False),
        ("off", Verdict.DIFFERS, False),
        ("off", Verdict.TESTED, True),
        ("same", Verdict.SAME, True),
        ("same", Verdict.DIFFERS, False),
        ("self", Verdict.DIFFERS, True),
    ],
)
def test_the_user_says_what_is_evidence_enough(
    offer: Offer, monkeypatch: pytest.MonkeyPatch, choice: str, found: Verdict, runs: bool
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_UNTESTED", choice)
    version = "0.33.0" if found is Verdict.TESTED else "0.34.0"
    assert offer(version=version, found=found) == (["activate"] if runs else ["refuse"])
    if not runs:
        assert outcome().reason.endswith(f"VLLM_COMMEXT_UNTESTED={choice}")


def test_a_name_that_is_gone_is_refused_whatever_the_parts_own_test_says(
    offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    assert offer(version="0.40.0", found=Verdict.DIFFERS, is_gone=True) == ["refuse"]
    assert outcome().reason == "vLLM 0.40.0 has no Thing.method"
    assert "off: nixl (vLLM 0.40.0 has no Thing.method)" in caplog.text


def test_a_bad_value_refuses_everything_and_lists_the_choices(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_NIXL", "yes")
    assert offer() == ["refuse"]
    assert outcome().required
    assert "VLLM_COMMEXT_NIXL: expected one of auto, 0, 1, got 'yes'" in outcome().reason


def test_an_unknown_name_is_a_warning(
    offer: Offer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_NIXI", "1")
    offer()
    assert outcome().state is State.ACTIVE
    assert "VLLM_COMMEXT_NIXI is no toggle of vllm_commext" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "given", "said"),
    [
        ("VLLM_COMMEXT_NIXL", "auto", {"problem": UnsupportedError("no NIXL")}, "no NIXL"),
        ("VLLM_COMMEXT_NIXL", "yes", {}, "got 'yes'"),
        ("VLLM_COMMEXT_NIXI", "1", {}, "no toggle"),
        ("VLLM_COMMEXT", "1", {"version": "0.40.0", "found": Verdict.SAME}, "active .same source"),
    ],
)
def test_strict_stops_vllm(
    offer: Offer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    given: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_STRICT", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=f"VLLM_COMMEXT_STRICT=1: .*{said}"):
        offer(**given)
    assert len(status.recorded()) == 1


def test_strict_is_content_where_all_is_well(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMMEXT_STRICT", "1")
    offer()
    assert outcome().state is State.ACTIVE


def test_a_fault_of_our_own_is_logged_and_vllm_goes_on(
    offer: Offer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "read_settings", lambda: 1 / 0)
    offer()
    assert "vLLM goes on without it" in caplog.text


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = """
import sys
import vllm_commext, vllm_commext.plugin, vllm_commext.settings, vllm_commext.status
import vllm_commext.cli.main
heavy = ("torch", "vllm", "numpy", "msgspec", "zmq", "nixl")
print([name for name in heavy if name in sys.modules])
"""
    done = run([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "[]"
