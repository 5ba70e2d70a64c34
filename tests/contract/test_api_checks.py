"""Every API check, probed on the installed vLLM."""

import pytest
import vllm

from vllm_commext.compat import api_checks, versions
from vllm_commext.compat.api_checks import CheckState
from vllm_commext.compat.api_signatures import ABSTRACT_METHODS, HOOKS
from vllm_commext.compat.api_table import API_CHECKS, ApiCheck


@pytest.mark.parametrize("api", API_CHECKS, ids=lambda api: api.name)
def test_an_api_check_holds_or_is_not_there_yet(api: ApiCheck) -> None:
    outcome = api_checks.check(api, vllm.__version__)
    if outcome.state is CheckState.NOT_YET:
        # Else the row's `since` is too late, and we do without something that is there.
        assert api_checks.guarded(api.probe) != ""
    else:
        assert (outcome.state, outcome.problem) == (CheckState.HOLDS, "")


def test_the_installed_version_is_one_that_we_say_is_tested() -> None:
    assert versions.judge(vllm.__version__).verdict is versions.Verdict.INSIDE


def test_the_abstract_methods_are_exactly_those_that_we_implement() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert KVConnectorBase_V1.__abstractmethods__ == set(ABSTRACT_METHODS)


def test_the_api_checks_cover_every_method_that_the_connector_overrides() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from vllm_commext.nixl.connector import CommextNixlConnector

    later = {"get_transfer_results", "get_loaded_kv_cache_group_ids"}
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

    assert "drain" in api_checks.guarded(api.probe, Newer())  # pyright: ignore[reportArgumentType]
