"""Workloads by seed, and Mooncake's traces."""

import json
from itertools import takewhile

import pytest
from goodputs.shapes import AGENTIC, CONVERSATION, WORKLOADS, held_tokens
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.bench import workload
from vllm_commext.bench.workload import Arrival, scaled, timed_trace
from vllm_commext.errors import ConfigError

names = st.sampled_from(sorted(WORKLOADS))
seeds = st.integers(0, 1 << 30)


@given(names, st.floats(0.2, 20), st.floats(1, 60), seeds)
def test_arrivals_are_in_order_and_the_same_for_a_seed(
    name: str, rate: float, seconds: float, seed: int
) -> None:
    found = WORKLOADS[name](rate, seconds, seed)
    assert found == WORKLOADS[name](rate, seconds, seed)
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert all(0 < one.at < seconds for one in found)
    assert all(one.prompt_tokens >= 1 and one.output_tokens >= 1 for one in found)
    assert all(0 <= one.shared_tokens <= one.prompt_tokens <= 32000 for one in found)
    held = held_tokens(found)
    assert all(0 <= tokens <= one.shared_tokens for tokens, one in zip(held, found, strict=True))


@given(names, seeds, st.floats(0.001, 2), st.integers(2, 4000))
def test_scaling_keeps_times_groups_and_bounds(
    name: str, seed: int, factor: float, most: int
) -> None:
    before = WORKLOADS[name](4, 20, seed)
    after = scaled(before, factor, most)
    assert [(one.at, one.group) for one in before] == [(one.at, one.group) for one in after]
    assert all(one.prompt_tokens + one.output_tokens <= most for one in after)
    assert all(0 <= one.shared_tokens <= one.prompt_tokens for one in after)


def test_scaling_cuts_an_answer_only_where_it_does_not_fit_beside_its_prompt() -> None:
    made = scaled([Arrival(0, *one) for one in ((50, 450), (300, 450), (400, 150))], 2, 1000)
    found = [(one.prompt_tokens, one.output_tokens) for one in made]
    assert found == [(100, 900), (500, 500), (700, 300)]


@pytest.mark.parametrize(
    ("name", "prompt", "output", "held"),
    [
        ("mixed", (3600, 3900), (150, 160), (0, 0)),
        (CONVERSATION, (10500, 12500), (320, 350), (0.33, 0.43)),
        ("document", (8000, 8000), (256, 256), (0, 0)),
        (AGENTIC, (9000, 13000), (115, 125), (0.85, 0.95)),
        ("short", (512, 512), (128, 128), (0, 0)),
    ],
)
def test_a_workload_has_the_means_that_it_says(
    name: str, prompt: tuple[int, int], output: tuple[int, int], held: tuple[float, float]
) -> None:
    found = WORKLOADS[name](4, 3000, 1)
    total = sum(one.prompt_tokens for one in found)
    assert 11500 < len(found) < 12500
    assert prompt[0] <= total / len(found) <= prompt[1]
    assert output[0] <= sum(one.output_tokens for one in found) / len(found) <= output[1]
    assert held[0] <= sum(held_tokens(found)) / total <= held[1]


# --- Mooncake's traces --------------------------------------------------------------------------

paths = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


def lines_of(all_ids: list[list[int]]) -> list[str]:
    return [
        json.dumps(
            {
                "timestamp": 500 * place,
                "input_length": workload.BLOCK_TOKENS * len(ids) + 7,
                "output_length": 5,
                "hash_ids": ids,
            }
        )
        for place, ids in enumerate(all_ids)
    ]


def common_blocks(one: list[int], other: list[int]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


@given(paths)
def test_no_two_arrivals_share_more_than_the_trace_says(all_ids: list[list[int]]) -> None:
    found = workload.parse_trace(lines_of(all_ids))
    for place, one in enumerate(found):
        assert one.at == place * 0.5
        for before in range(place):
            if one.group == found[before].group >= 0:
                shared = min(one.shared_tokens, found[before].shared_tokens)
                assert shared <= workload.BLOCK_TOKENS * common_blocks(
                    all_ids[before], all_ids[place]
                )


def test_conversations_that_begin_alike_keep_what_they_share() -> None:
    first, second = [0, 1, 2, 3], [0, 7, 8, 9, 10]
    ids = [first, second, [*first, 4, 5], [0, 50], [*second, 11], [*first, 4, 5, 6]]
    assert held_tokens(workload.parse_trace(lines_of(ids))) == [
        512 * blocks for blocks in (0, 0, 4, 1, 5, 6)
    ]


@given(names, seeds)
def test_an_exported_trace_shares_what_the_arrivals_share(name: str, seed: int) -> None:
    arrivals = scaled(WORKLOADS[name](4, 5, seed), 0.1, 4000)
    found = [*map(json.loads, timed_trace(arrivals).splitlines())]
    for place, (line, one) in enumerate(zip(found, arrivals, strict=True)):
        assert line["timestamp"] == one.at
        assert (line["input_length"], line["output_length"]) == (
            one.prompt_tokens,
            one.output_tokens,
        )
        assert len(line["hash_ids"]) == -(-one.prompt_tokens // workload.CHUNK_TOKENS)
        for before, other in zip(found[:place], arrivals[:place], strict=True):
            shared = min(one.shared_tokens, other.shared_tokens) if one.group == other.group else 0
            common = common_blocks(before["hash_ids"], line["hash_ids"])
            assert common == shared // workload.CHUNK_TOKENS


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 1, "input_length": 5}',
        '{"timestamp": "1", "input_length": 5, "output_length": 5}',
        '{"timestamp": -1, "input_length": 5, "output_length": 5}',
        '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}',
        '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1, 2]}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    good = '{"timestamp": 1, "input_length": 5, "output_length": 5}'
    with pytest.raises(ConfigError, match="line 2: .*expected"):
        workload.parse_trace([good, line])


def test_a_trace_is_stretched_to_a_rate() -> None:
    found = [Arrival(place * 0.1, 1, 1) for place in range(101)]
    assert len(workload.at_rate(found, 2, 20)) == 40
