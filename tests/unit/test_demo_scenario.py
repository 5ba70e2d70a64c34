"""The demo takes the scenario that suits its model and sizes."""

import argparse
from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo


def parsed(*arguments: str) -> argparse.Namespace:
    return demo.parser().parse_args(arguments)


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
