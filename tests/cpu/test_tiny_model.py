"""The tiny model must be able to show a damaged KV cache, or every parity test would be vacuous."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_commext.errors import ConfigError
from vllm_commext.testing.tiny_model import BOS_ID, kv_bytes_per_token, write_tiny_model

NUM_TOKENS = 40
ONE = "The quick brown fox jumps over the lazy dog."
OTHER = "The quick brown cat jumps over the lazy dog."


@pytest.fixture(scope="module")
def llama(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model)


def last_logprobs(llama: torch.nn.Module, text: str) -> torch.Tensor:
    with torch.no_grad():
        return llama(torch.tensor([list(text.encode())])).logits[0, -1].log_softmax(-1)


def test_one_earlier_word_changes_the_next_token(llama: torch.nn.Module) -> None:
    one, other = last_logprobs(llama, ONE), last_logprobs(llama, OTHER)
    top = one.argmax()
    assert (one[top] - other[top]).abs() > 1.0


def test_greedy_output_is_varied(llama: torch.nn.Module) -> None:
    prompt = torch.tensor([list(ONE.encode())])
    tokens = llama.generate(
        prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, prompt.shape[1] :]
    assert len(set(tokens.tolist())) > NUM_TOKENS // 2


def test_tokens_are_bytes(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Grüße, \n\x00 $ 字"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == BOS_ID


def test_same_seed_same_files_other_seed_other_weights(tmp_path: Path, model: Path) -> None:
    again, other = write_tiny_model(tmp_path / "again"), write_tiny_model(tmp_path / "b", seed=1)
    for path in sorted(model.iterdir()):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    weights = "model.safetensors"
    assert (model / weights).read_bytes() != (other / weights).read_bytes()


def test_bytes_per_token(model: Path) -> None:
    keys_and_values, layers, kv_heads, head_dim, float32 = 2, 4, 4, 32, 4
    assert kv_bytes_per_token(model) == keys_and_values * layers * kv_heads * head_dim * float32


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama.*got 'lama'"):
        write_tiny_model(tmp_path, kind="lama")
