"""Which scenario the demo takes, what it needs of a block, and its prompts of one length."""

import argparse
import json
from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo
from tests.kit.prompts import MIN_EQUAL_TOKENS, equal_prompts
from vllm_commext.errors import ConfigError


def parsed(*arguments: str) -> argparse.Namespace:
    return demo.parser().parse_args(arguments)


def test_prompts_of_one_length_are_different_and_the_same_for_a_seed() -> None:
    prompts = equal_prompts(40, 130, seed=1)
    assert len(set(prompts)) == 40
    assert {len(prompt) for prompt in prompts} == {130}
    assert prompts == equal_prompts(40, 130, seed=1)
    assert set(prompts).isdisjoint(equal_prompts(40, 130, seed=2))


def test_prompts_too_short_to_be_different_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"at least {MIN_EQUAL_TOKENS} tokens, got 1"):
        equal_prompts(1000, 1, seed=1)


@pytest.mark.parametrize(
    ("arguments", "name", "sizes"),
    [
        ([], "EqualTpScenario", (1, 1)),
        (["--tp", "2"], "EqualTpScenario", (2, 2)),
        (["--tp", "2", "--d-tp", "1"], "SplitScenario", (2, 1)),
        (["--p-tp", "1", "--d-tp", "2"], "SplitScenario", (1, 2)),
        (["--model", "llama1", "--tp", "2"], "EqualTpScenario", (2, 2)),
        (["--model", "granite1"], "SplitScenario", (1, 1)),
        (["--model", "swa", "--tp", "2"], "SplitScenario", (2, 2)),
    ],
)
def test_the_course_suits_the_model_and_the_sizes(
    arguments: list[str], name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    scenario = demo.choose_scenario(parsed(*arguments), tmp_path)
    assert type(scenario).__name__ == name
    assert (scenario.options.prefill_tp, scenario.options.decode_tp) == sizes


@pytest.mark.parametrize("arguments", [["--model", "gpt5"], ["--tp", "5"], ["--p-tp", "0"]])
def test_unknown_models_and_sizes_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_heads", "decode_tp", "expected"),
    [(4, 1, 131072), (4, 2, 131072), (1, 1, 32768), (1, 2, 65536), (2, 4, 131072)],
)
def test_ranks_that_share_a_head_hold_it_each(
    num_heads: int, decode_tp: int, expected: int, tmp_path: Path
) -> None:
    pytest.importorskip("httpx")
    from tests.kit.demo.scenario import kv_bytes_per_block

    fields = {"model_type": "llama", "num_key_value_heads": num_heads, "num_hidden_layers": 4}
    text = json.dumps({**fields, "head_dim": 32, "dtype": "float32"})
    (tmp_path / "config.json").write_text(text)
    assert kv_bytes_per_block(tmp_path, decode_tp) == expected
