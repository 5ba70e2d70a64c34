"""The tiny models must be able to show a damaged KV cache or state, or every parity test would be
vacuous."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiny_kinds import ALWAYS, BOS_ID, COMMON_FIELDS, KINDS, NUM_BYTES, NUM_TOKENS
from tests.kit.tiny_model import kv_bytes_per_token, write_tiny_model
from vllm_commext.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def with_marks(kinds: Iterable[str]) -> list[Any]:
    """The kinds that `make test` has no servers of are marked long."""
    long = pytest.mark.long
    return [one if one in ALWAYS else pytest.param(one, marks=long) for one in kinds]


HYBRIDS = ("falcon", "granite", "granite1", "nemotron", "qwen3next")
ALONE = {"llama1": {"num_key_value_heads": 1}, "granite1": {"mamba_n_groups": 1}}
NUM_PROMPT_TOKENS, EARLY = 200, 5
NUM_GENERATED = 16
ATTENTION, STATE = "o_proj", "out_proj"
# Nats; float32 rounding moves a logprob of these models by 1e-4 at most.
VISIBLE = 0.05


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other cost minutes on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=with_marks(sorted(KINDS)))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / kind, kind)


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def prompt_and_changed(seed: int = 0) -> tuple[list[int], list[int]]:
    """A prompt, and the same with another token at place ``EARLY``."""
    rng = random.Random(seed)
    prompt = [rng.randrange(NUM_BYTES) for _ in range(NUM_PROMPT_TOKENS)]
    changed = [*prompt]
    changed[EARLY] = (prompt[EARLY] + 1) % NUM_BYTES
    return prompt, changed


def last_logprobs(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


def change(model: torch.nn.Module) -> float:
    """How far an early token moves the logprob of the most likely next one, in nats."""
    one, other = (last_logprobs(model, prompt) for prompt in prompt_and_changed())
    top = one.topk(5).indices
    return (one - other)[top].abs().max().item()


def silenced(module: torch.nn.Module, suffix: str) -> ExitStack:
    """Let all submodules whose name ends so give zeros until the stack closes."""

    def zeros(_module: torch.nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    stack = ExitStack()
    found = [one for name, one in module.named_modules() if name.endswith(suffix)]
    assert found, f"no submodule ends with {suffix}"
    for one in found:
        stack.callback(one.register_forward_hook(zeros).remove)
    return stack


def test_an_early_token_changes_the_next_one(model: torch.nn.Module) -> None:
    assert change(model) > VISIBLE


@pytest.mark.parametrize("kind", with_marks(HYBRIDS), indirect=True)
def test_it_shows_through_attention_alone_and_through_the_state_alone(
    model: torch.nn.Module,
) -> None:
    with silenced(model, ATTENTION):
        assert change(model) > VISIBLE
    with silenced(model, STATE):
        assert change(model) > VISIBLE
    with silenced(model, ATTENTION), silenced(model, STATE):
        assert change(model) == 0


def test_greedy_output_is_varied(model: torch.nn.Module) -> None:
    prompt, _ = prompt_and_changed()
    tokens = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_GENERATED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :]
    assert len(set(tokens.tolist())) > NUM_GENERATED // 4


def test_same_seed_same_files_other_seed_other_weights(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    again = write_tiny_model(tmp_path / "again", kind)
    other = write_tiny_model(tmp_path / "other", kind, seed=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() != (other / weights).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_share_is_even(kind: str) -> None:
    fields = {**COMMON_FIELDS, **KINDS[kind].fields}
    shared = [one for one in fields if one.endswith(("_heads", "n_groups", "intermediate_size"))]
    assert "num_attention_heads" in shared
    assert {one: fields[one] for one in shared if fields[one] % 2} == ALONE.get(kind, {})


def test_tokens_are_bytes(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Grüße, \n\x00 $ 字"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == BOS_ID
    assert len(tokenizer) == NUM_TOKENS


def test_bytes_per_token(tmp_path: Path) -> None:
    keys_and_values, layers, head_dim = 2, 4, 32
    for kind, kv_heads, dtype, size in (("llama", 4, "float32", 4), ("llama1", 1, "bfloat16", 2)):
        folder = write_tiny_model(tmp_path / kind, kind, dtype=dtype)
        expected = keys_and_values * layers * kv_heads * head_dim * size
        assert kv_bytes_per_token(folder) == expected


def test_bytes_per_token_are_refused_for_a_state(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "granite")
    with pytest.raises(ConfigError, match=r"'llama', got 'granitemoehybrid'"):
        kv_bytes_per_token(folder)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama.*got 'lama'"):
        write_tiny_model(tmp_path, kind="lama")
