"""Prompts in vLLM's own scheduler beside an answer with a limit: in pieces, the same tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.scheduled_core import Core, request_of
from tests.kit.tiny_model import write_tiny_model
from vllm_commext.nixl.step_budget import StepBudget

PROMPT = list(range(1, 13))
LIMITED = {"tpot_ms": 20}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Core]:
    model = write_tiny_model(tmp_path / "model", "llama")
    core = Core(model, "kv_both", is_async=request.param)
    yield core
    core.close()


def chunks(core: Core, limited: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps' sizes of a prompt that comes beside an answer with these parameters."""
    told: list[int] = []
    compute = core.worker._compute  # pyright: ignore[reportPrivateUsage]

    def note(name: str, start: int, count: int) -> list[int]:
        if name == "prompt" and start < len(PROMPT):
            told.append(count)
        return compute(name, start, count)

    monkeypatch.setattr(core.worker, "_compute", note)
    core.add(request_of("answer", [7, 8, 9], limited, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        core.turn()
    core.add(request_of("prompt", PROMPT, max_tokens=3))
    core.run("prompt", "answer")
    return told


def test_a_prompt_is_cut_beside_an_answer_with_a_limit_alone(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepBudget, "prompt_tokens", lambda *_: 4)
    assert chunks(core, LIMITED, monkeypatch) == [4, 4, 4]
    cut = core.answer("prompt").tokens
    core.outputs.clear()
    core.scheduler.reset_prefix_cache()
    assert chunks(core, None, monkeypatch) == [12]
    assert core.answer("prompt").tokens == cut
    assert core.scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_a_threshold_of_the_operators_is_kept(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    core.scheduler.scheduler_config.long_prefill_token_threshold = 3
    monkeypatch.setattr(StepBudget, "prompt_tokens", lambda *_: 4)
    assert chunks(core, LIMITED, monkeypatch) == [3, 3, 3, 3]
    assert core.scheduler.scheduler_config.long_prefill_token_threshold == 3
