"""Contestants, records and tables of `benchmarks/goodput.py`."""

from pathlib import Path

import pytest
from goodputs import contestants, plays, report
from goodputs.engines import BOTH, NIXL, PLAIN, EngineSet
from goodputs.plays import Play

from vllm_commext.bench.figures import Sample
from vllm_commext.errors import ConfigError
from vllm_commext.limits import Limits

TIGHT, LOOSE = LIMITS = contestants.limits_of("10:1000,25:500")
URLS = ["http://a", "http://b", "http://c"]


def samples(good: int, of: int = 20) -> list[Sample]:
    return [
        Sample(0.1, 50, 11, 0.2, 0.2 + 10 * (0.005 if n < good else 0.02), 0.02) for n in range(of)
    ]


def all_plays() -> list[Play]:
    good = {"replicas": 10, "fixed": 14, "adaptive 10/1000": 18, "adaptive 25/500": 2}
    told = {"adaptive 10/1000": TIGHT, "adaptive 25/500": LOOSE}
    return [
        Play("mixed", rate, number, name, told.get(name), 0.001, samples(20 if rate < 5 else many))
        for rate in (4.0, 8.0)
        for number in range(2)
        for name, many in good.items()
    ]


def test_contestants_share_engines_and_know_their_limits() -> None:
    made = contestants.make(["replicas", "fixed", "adaptive", "nixl", "fixed"], 2048, [512], LIMITS)
    assert [one.name for one in made] == [
        *("replicas", "fixed", "adaptive 10/1000", "adaptive 25/500", "nixl", "fixed (2)"),
        "replicas 512",
    ]
    sets = [EngineSet(BOTH, 2048), EngineSet(NIXL, 2048), EngineSet(PLAIN, 512)]
    assert list(dict.fromkeys(one.engines for one in made)) == sets
    assert made[0].proxy_options(URLS[:2], 1) == [
        *("--engine", URLS[0], "--engine", URLS[1], "--placement", "local")
    ]
    assert made[1].proxy_options(URLS, 1) == [
        *("--prefill", URLS[0], "--decode", URLS[1], "--decode", URLS[2])
    ]
    limits = ("--ttft-ms", "1000", "--tpot-ms", "10")
    assert made[2].options[-6:] == (*limits, "--prompt-order", "arrival")
    assert (made[2].told, made[3].told) == (Limits(0.01, 1.0), Limits(0.025, 0.5))


@pytest.mark.parametrize("text", ["10", "10:x", "", "1:2:3"])
def test_wrong_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TPOT:TTFT"):
        contestants.limits_of(text)


def test_records_come_back_from_a_file(tmp_path: Path) -> None:
    found = all_plays()
    plays.append(tmp_path / "x.jsonl", found[:3])
    plays.append(tmp_path / "x.jsonl", found[3:])
    assert [one.cell for one in plays.read(tmp_path / "x.jsonl")] == [one.cell for one in found]
    assert plays.of_line(plays.as_line(found[2])) == found[2]


def test_one_that_was_told_limits_stands_for_them_alone() -> None:
    found = all_plays()
    rates = report.largest_rates(found, "mixed", TIGHT)
    assert rates == {
        "replicas": (pytest.approx(4.8), ""),
        "fixed": (pytest.approx(4 + 4 / 3), ""),
        report.TOLD: (8.0, ">="),
    }
    said = report.verdicts(found, "mixed", LIMITS)
    assert len(said) == 4
    assert any("adaptive 10/1000 serves 1.29x the requests of fixed" in one for one in said)
    untold = [one for one in found if one.told is None]
    assert len(report.verdicts(untold, "mixed", LIMITS)) == 4
    assert "1.40x the requests of replicas" in "".join(report.verdicts(untold, "mixed", LIMITS))


def test_the_page_has_every_way() -> None:
    found = all_plays()
    page = "\n".join(report.markdown(found, LIMITS, {"machine": "m"}, 2))
    for name in ("replicas", "fixed", "adaptive 10/1000", "adaptive 25/500"):
        assert f"| {name} |" in page
    assert "| 8 | fixed | 200 / 200 / 200 | 5.0 / 20.0 / 20.0 |" in page
    assert report.markdown([], LIMITS, {}, 2)
