"""Which KV cache layout vLLM takes for an engine with the connector: vLLM's own code chooses, from
what the connector asks for and what its real attention backends say that they take."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.contract.test_kv_connector import vllm_config
from vllm_commext import plugin
from vllm_commext.nixl.connector import CommextNixlConnector

BACKENDS = {
    name: getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), f"{name}Backend")
    for name, module in {
        "CPUAttention": "cpu_attn",
        "FlashAttention": "flash_attn",
        "TritonAttention": "triton_attn",
        "FlexAttention": "flex_attention",
    }.items()
}


@pytest.fixture(autouse=True)
def _no_multi_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an engine without one, whatever other tests have imported."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


@pytest.fixture
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def engine_config(
    *, use_mla: bool = False, is_hybrid: bool = False, block_size: int = 16, **transfer: Any
) -> Any:
    config = vllm_config()
    config.model_config = SimpleNamespace(use_mla=use_mla, is_hybrid=is_hybrid)  # pyright: ignore
    config.cache_config.block_size = block_size
    for name, value in transfer.items():
        setattr(config.kv_transfer_config, name, value)
    return config


def chosen(config: Any, *backends: str) -> str:
    """The layout that vLLM resolves for layers of these attention backends."""
    from vllm.v1.attention.backends import utils

    classes = [BACKENDS[name] for name in backends]
    names = [layout.name for layout in utils.get_supported_kv_cache_layouts(classes)]
    return utils.resolve_kv_cache_layout(config, [names], []).name


@pytest.mark.usefixtures("_on_cuda")
@pytest.mark.parametrize(
    ("backends", "layout"),
    [
        (["FlashAttention"], "BLHNC"),
        (["TritonAttention"], "BLHNC"),
        (["FlashAttention", "TritonAttention"], "BLHNC"),
        (["FlexAttention"], "LBNHC"),
        (["CPUAttention"], "LBHNC"),
    ],
)
def test_layers_of_a_block_lie_side_by_side_where_the_backends_take_it(
    backends: list[str], layout: str
) -> None:
    assert chosen(engine_config(), *backends) == layout


@pytest.mark.usefixtures("_on_cuda")
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_blocks_that_a_backend_may_have_to_split_stay_in_a_layers_own_run(block_size: int) -> None:
    layout = "BLHNC" if block_size <= 64 else "LBHNC"
    assert chosen(engine_config(block_size=block_size), "FlashAttention") == layout


@pytest.mark.usefixtures("_on_cuda")
def test_states_and_latent_caches_keep_their_layouts() -> None:
    assert chosen(engine_config(is_hybrid=True), "FlashAttention") == "LBHNC"
    assert CommextNixlConnector.get_required_kvcache_layout(engine_config(use_mla=True)) is None


@pytest.mark.usefixtures("_on_cuda")
def test_the_users_choice_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert chosen(engine_config(), "FlashAttention") == "LBHNC"


@pytest.mark.usefixtures("_on_cuda")
def test_beside_vllms_connectors_all_ask_for_one_layout() -> None:
    plugin.register()
    ours = {"kv_connector": "CommextNixlConnector", "kv_role": "kv_both"}
    theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config = engine_config(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": [ours, theirs]},
    )
    assert chosen(config, "FlashAttention") == "LBHNC"


def test_a_cpu_is_asked_for_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    assert CommextNixlConnector.get_required_kvcache_layout(engine_config()) == "LBHNC"
    assert chosen(engine_config(), "CPUAttention") == "LBHNC"
    assert "does not satisfy" not in caplog.text
