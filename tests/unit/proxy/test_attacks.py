"""The judge of `make attack`, on a victim of its own: it passes what does no harm, and fails what
does."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.attack import judge as judge_module
from tests.attack import side_attacks
from tests.attack.judge import Attack, judge
from tests.attack.side_victim import SideVictim
from tests.kit.ports import free_port


class Harmless:
    """A victim that is this very process."""

    def __init__(self) -> None:
        self.pids = self.serving = (os.getpid(),)
        self.kept: list[bytes] = []
        self.fails = False

    def honest(self) -> None:
        if self.fails:
            raise ValueError("refused")

    def held(self) -> Mapping[str, float]:
        return {"kept": float(len(self.kept))}


class Greedy(Harmless):
    """It keeps something of each honest request."""

    def honest(self) -> None:
        self.kept.append(b"")


class Refusing(Harmless):
    """It refuses, after the warm-up."""

    def honest(self) -> None:
        self.kept.append(b"")
        if len(self.kept) == 60:
            raise ValueError("refused")

    def held(self) -> Mapping[str, float]:
        return {}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Harmless, []), (Greedy, ["not free after"]), (Refusing, ["1 failed, ValueError: refused"])],
)
def test_a_verdict_says_what_others_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Harmless], expected: list[str]
) -> None:
    monkeypatch.setattr(judge_module, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(judge_module, "FREE_SECONDS", 0.2)

    @contextmanager
    def started(_: Path) -> Iterator[Harmless]:
        yield kind()

    attack = Attack("one", "none", started, lambda _: time.sleep(1.0))
    problems = [line for line in judge(attack, tmp_path).problems if "waited" not in line]
    assert len(problems) == len(expected)
    assert all(map(str.startswith, problems, expected))


def _fall(_: object) -> None:
    raise RuntimeError("nothing could be sent")


def test_an_attack_that_does_not_happen_has_proven_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "QUIET_SECONDS", 0.1)
    verdict = judge(Attack("none", "", lambda _: nullcontext(Harmless()), _fall), tmp_path)
    assert "the attack itself ended with 1" in verdict.problems


def test_pouring_into_a_port_that_is_shut_is_no_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_attacks, "SECONDS", 0.1)
    victim = SideVictim(os.getpid(), os.getpid(), free_port(), None, "")
    with pytest.raises(RuntimeError, match="nothing could be sent on any of 3 connections"):
        side_attacks._pour(victim, b"x", 3)
