"""The tiny models must be able to show a damaged KV cache or state, or every parity test would be
vacuous."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiny_kinds import ALWAYS, KINDS, NUM_BYTES
from tests.kit.tiny_model import write_tiny_model

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def with_marks(kinds: Iterable[str]) -> list[Any]:
    """The kinds that `make test` has no servers of are marked long."""
    long = pytest.mark.long
    return [one if one in ALWAYS else pytest.param(one, marks=long) for one in kinds]


HYBRIDS = ("falcon", "granite", "granite1", "nemotron", "qwen3next")
NUM_PROMPT_TOKENS, EARLY = 200, 5
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
