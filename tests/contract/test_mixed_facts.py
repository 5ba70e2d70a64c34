"""What engines of different versions of vLLM, and of transformers, compare of their models."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.kit.tiny_model import write_tiny_model
from vllm_commext.compat.kv_connector import config_file_of
from vllm_commext.nixl.engine_facts import (
    _config_digest,
    _digest_of_files,
    engine_facts,
    weight_files,
)

CONFIG = {"model_type": "llama", "rope_theta": 1e4, "transformers_version": "5.1"}


def model(folder: Path, made_of_it: dict[str, Any], overrides: Any = None) -> Any:
    """As much of vLLM's ModelConfig as is looked at."""
    made = SimpleNamespace(to_dict=lambda: dict(made_of_it))
    overrides = {} if overrides is None else overrides
    return SimpleNamespace(model=str(folder), revision=None, hf_overrides=overrides, hf_config=made)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_what_a_newer_library_adds_to_the_configuration_changes_nothing(folder: Path) -> None:
    older = model(folder, {**CONFIG, "head_dim": 8})
    newer = model(folder, {**CONFIG, "head_dim": 8, "a_new_field": None})
    assert _config_digest(older) == _config_digest(newer)


def test_where_the_model_lies_and_who_wrote_it_changes_nothing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "5.2"}))
    assert _config_digest(model(folder, {})) == _config_digest(model(other, {}))


def test_another_file_and_another_override_are_another_model(folder: Path) -> None:
    found = {_config_digest(model(folder, {}))}
    found.add(_config_digest(model(folder, {}, {"rope_theta": 5e5})))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))
    found.add(_config_digest(model(folder, {})))
    assert len(found) == 3


def test_without_a_file_or_with_code_that_changes_it_the_made_configuration_counts(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert config_file_of(model(empty, {})) is None
    for where, overrides in ((empty, None), (folder, lambda config: config)):
        one, other = ({**CONFIG, "head_dim": size} for size in (8, 16))
        digests = {_config_digest(model(where, made, overrides)) for made in (one, other)}
        assert len(digests) == 2


def test_engines_compare_the_files_of_their_weights(tmp_path: Path) -> None:
    """Wherever they are, a hub's snapshot too; weights of no files agree with such alone."""
    one, same, other = (write_tiny_model(tmp_path / f"{n}", seed=n // 2) for n in range(3))
    snapshot, hub = tmp_path / "hub" / "models--a--b" / "snapshots" / ("c" * 40), tmp_path / "hub"
    shutil.copytree(one, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)

    def found(model: Path | str, load_format: str = "auto", weights: str = "") -> str:
        _digest_of_files.cache_clear()
        told = SimpleNamespace(model=str(model), revision=None, model_weights=weights)
        load = SimpleNamespace(load_format=load_format, download_dir=str(hub))
        return weight_files(SimpleNamespace(model_config=told, load_config=load))  # pyright: ignore

    first = found(one)
    assert len(first) == 32
    assert first == found(same) == found("a/b") == found(one, "safetensors") != found(other)
    assert {found(one, "dummy"), found("not/there")} == {""}
    streamed = [found(one, "runai_streamer", url) for url in ("s3://a/1", "s3://a/1", "s3://a/2")]
    assert streamed[0] == streamed[1] != streamed[2]
    shutil.copytree(other, one, dirs_exist_ok=True)
    assert found(one) == found(other)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("max_model_len", "is_long"), [(64, False), (65, True), (128, True)])
def test_the_length_that_an_engine_serves_decides_how_long_rope_turns_keys(
    tmp_path: Path, max_model_len: int, is_long: bool
) -> None:
    """vLLM takes the long factors for all tokens where longer prompts can come."""
    folder = write_tiny_model(tmp_path / "llama")
    overrides = {"rope_parameters": LONG_ROPE, "max_position_embeddings": 128}
    config = VllmConfig(
        model_config=ModelConfig(
            str(folder),
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            hf_overrides=overrides,
        )
    )
    with set_current_vllm_config(config):
        chosen = Phi3LongRoPEScaledRotaryEmbedding(
            *(16, 16, 128, 64, 1e4, True, torch.float32, [1.0] * 8, [4.0] * 8)
        )
    assert chosen.use_long_rope == is_long
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    found = engine_facts(config, cache)
    assert (found["long_rope"], len(found["weight_files"])) == (str(is_long), 32)


def test_quantization_of_a_checkpoint_without_it_is_compared(tmp_path: Path) -> None:
    """That of a quantized one is in its configuration; kernels may give it another name."""
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    made = ModelConfig(str(write_tiny_model(tmp_path / "llama")), skip_tokenizer_init=True)
    config, found = VllmConfig(model_config=made), list[str]()
    for own in (None, {"quant_method": "fp8"}):
        for name in (None, "fp8"):
            made.model_arch_config.quantization_config, made.quantization = own, name
            found.append(engine_facts(config, cache)["online_quantization"])
    assert found == ["None", "fp8", "None", "None"]
