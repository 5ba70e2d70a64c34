"""Each part on the installed vLLM: its digests are those of the table, and its own test passes."""

from typing import Any

import pytest
import vllm
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_commext import UnsupportedError
from vllm_commext.compat import fits, hooks, self_tests
from vllm_commext.compat.fits import Verdict
from vllm_commext.compat.parts import IN_USE, PARTS, Part

TRIED = [part for part in PARTS if part.self_test not in ("", IN_USE)]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_installed_version_is_one_that_we_say_is_tested(part: Part) -> None:
    assert fits.find(part.name).verdict is Verdict.TESTED


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_its_source_is_what_the_table_says(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever Python reads it."""
    monkeypatch.setattr(hooks, "vllm_version", lambda: f"{vllm.__version__.split('+')[0]}.post1")
    found = fits.find(part.name)
    assert found.verdict is Verdict.SAME, found.reason
    assert fits.why_gone(part.name) == ""


@pytest.mark.parametrize("part", TRIED, ids=lambda part: part.name)
def test_a_part_passes_its_own_test(part: Part) -> None:
    getattr(self_tests, part.self_test)()


def test_every_method_that_the_connector_overrides_is_a_name_of_its_part() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from vllm_commext.nixl.connector import CommextNixlConnector

    newer = {"supports_sleep_mode"}  # of 0.33; asked where it is there
    named = {symbol.rpartition(".")[2] for symbol in PARTS[0].sources}
    inherited = {*vars(base.KVConnectorBase_V1)} - newer
    ours = {name for name in vars(CommextNixlConnector) if not name.startswith("_")}
    assert (ours & inherited) - named == set()
    assert "SupportsHMA" in {symbol.partition(":")[2] for symbol in PARTS[0].sources}


def test_a_queue_with_one_more_method_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageQueue, "drain", lambda self: None, raising=False)
    monkeypatch.setattr(self_tests, "original_of", lambda _: MessageQueue)
    with pytest.raises(UnsupportedError, match="whether drain of queues takes what vLLM passes"):
        self_tests.queue()


def test_a_queue_that_is_called_otherwise_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageQueue, "enqueue", lambda self, obj, timeout=None, lane=0: None)
    monkeypatch.setattr(self_tests, "original_of", lambda _: MessageQueue)
    with pytest.raises(UnsupportedError, match="whether enqueue of queues"):
        self_tests.queue()


def test_a_hook_with_one_more_argument_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(self: Any, request: Any, lane: int) -> None: ...

    monkeypatch.setattr(KVConnectorBase_V1, "on_new_request", more)
    with pytest.raises(UnsupportedError, match=r"parameters of on_new_request: expected"):
        self_tests.hand_over()


def test_one_more_abstract_method_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = KVConnectorBase_V1.__abstractmethods__ | {"lend"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", methods)
    with pytest.raises(UnsupportedError, match=r"methods without ours.*lend"):
        self_tests.hand_over()
