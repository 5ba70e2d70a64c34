"""Every API check, probed on the installed vLLM."""

import importlib

import pytest
import vllm
from vllm.v1.core.block_pool import BlockPool

from vllm_commext.compat import api_probes, evidence, hooks
from vllm_commext.compat.api_checks import API_CHECKS
from vllm_commext.compat.api_connector import ABSTRACT_METHODS, HOOKS
from vllm_commext.compat.api_probes import ApiCheck, CheckState
from vllm_commext.compat.parts import BY_NAME, PARTS, Part


@pytest.mark.parametrize("api", API_CHECKS, ids=lambda api: api.name)
def test_an_api_check_holds_or_is_not_there_yet(api: ApiCheck) -> None:
    outcome = api_probes.check(api, vllm.__version__)
    if outcome.state is CheckState.NOT_YET:
        # Else the row's `since` is too late, and we do without something that is there.
        assert api_probes.guarded(api.probe) != ""
    else:
        assert (outcome.state, outcome.problem) == (CheckState.HOLDS, "")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_installed_version_is_one_that_we_say_is_tested(part: Part) -> None:
    assert evidence.evidence_for(part.name).verdict is evidence.Verdict.TESTED


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_its_source_is_what_the_table_says(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever Python reads it."""
    monkeypatch.setattr(hooks, "vllm_version", lambda: f"{vllm.__version__.split('+')[0]}.post1")
    found = evidence.evidence_for(part.name)
    assert found.verdict is evidence.Verdict.SAME, found.reason


@pytest.mark.parametrize("name", [part.name for part in PARTS if ":" in part.self_test])
def test_a_part_passes_its_own_test(name: str) -> None:
    module, _, function = BY_NAME[name].self_test.partition(":")
    if name == "nixl reuse" and not hasattr(BlockPool, "unpin_blocks"):
        pytest.skip("this vLLM has none of it")
    getattr(importlib.import_module(module), function)()


def test_the_abstract_methods_are_exactly_those_that_we_implement() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert KVConnectorBase_V1.__abstractmethods__ == set(ABSTRACT_METHODS)


def test_the_api_checks_cover_every_method_that_the_connector_overrides() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from vllm_commext.nixl.connector import CommextNixlConnector

    later = {"get_transfer_results", "get_loaded_kv_cache_group_ids", "supports_sleep_mode"}
    probed = {*ABSTRACT_METHODS, *HOOKS, *later, "request_finished_all_groups"}
    inherited = {*vars(base.KVConnectorBase_V1), *vars(base.SupportsHMA), *later}
    ours = {name for name in vars(CommextNixlConnector) if not name.startswith("_")}
    assert ours & inherited == probed


def test_a_method_that_only_vllms_queue_has_breaks_its_check() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    [api] = [api for api in API_CHECKS if api.name == "queue_has_no_other_methods"]

    class Newer:
        def resolve(self, path: str) -> type:
            return type("MessageQueue", (), {**vars(MessageQueue), "drain": lambda self: None})

    assert "drain" in api_probes.guarded(api.probe, Newer())  # pyright: ignore[reportArgumentType]
