"""Every seam, probed on the installed vLLM."""

import pytest
import vllm

from vllm_commext.compat import seams, versions
from vllm_commext.compat.seam_signatures import ABSTRACT_METHODS, HOOKS
from vllm_commext.compat.seam_table import SEAMS, Seam
from vllm_commext.compat.seams import SeamState


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_seam_holds_or_is_not_there_yet(seam: Seam) -> None:
    outcome = seams.check(seam, vllm.__version__)
    if outcome.state is SeamState.NOT_YET:
        # Else the row's `since` is too late, and we do without something that is there.
        assert seams.guarded(seam.probe) != ""
    else:
        assert (outcome.state, outcome.problem) == (SeamState.HOLDS, "")


def test_the_installed_version_is_one_that_we_say_is_tested() -> None:
    assert versions.judge(vllm.__version__).verdict is versions.Verdict.INSIDE


def test_the_abstract_methods_are_exactly_those_that_we_implement() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert KVConnectorBase_V1.__abstractmethods__ == set(ABSTRACT_METHODS)


def test_the_seams_cover_every_method_that_the_connector_overrides() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from vllm_commext.nixl.connector import CommextNixlConnector

    later = {"get_transfer_results", "get_loaded_kv_cache_group_ids"}
    probed = {*ABSTRACT_METHODS, *HOOKS, *later, "request_finished_all_groups"}
    inherited = {*vars(base.KVConnectorBase_V1), *vars(base.SupportsHMA), *later}
    ours = {name for name in vars(CommextNixlConnector) if not name.startswith("_")}
    assert ours & inherited == probed


def test_a_method_that_only_vllms_queue_has_breaks_its_seam() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    [seam] = [seam for seam in SEAMS if seam.name == "queue_has_no_other_methods"]

    class Newer:
        def resolve(self, path: str) -> type:
            return type("MessageQueue", (), {**vars(MessageQueue), "drain": lambda self: None})

    assert "drain" in seams.guarded(seam.probe, Newer())  # pyright: ignore[reportArgumentType]
