"""A trace of `vllm-commext bench` in the hands of vLLM's own benchmark."""

from pathlib import Path
from typing import Any

import pytest

from vllm_commext.bench.workload import Arrival, timed_trace

datasets: Any = pytest.importorskip("vllm.benchmarks.datasets.datasets")


class Tokenizer:
    all_special_ids = (0,)

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(100)}


def test_vllms_benchmark_plays_the_arrivals(tmp_path: Path) -> None:
    parser = datasets.FlexibleArgumentParser()
    datasets.add_dataset_parser(parser)
    arrivals = [
        Arrival(0.25, 100, 7),
        Arrival(0.5, 40, 3, group=0, shared_tokens=32),
        Arrival(1.5, 333, 9, group=0, shared_tokens=40),
        Arrival(1.75, 1, 1),
    ]
    file = tmp_path / "trace"
    file.write_text(timed_trace(arrivals))
    words = ["--dataset-name", "timed_trace", "--dataset-path", str(file), "--num-prompts", "9"]
    made = datasets.get_samples(parser.parse_args(words), Tokenizer())
    assert [(one.timestamp, one.prompt_len, one.expected_output_len) for one in made] == [
        (one.at, one.prompt_tokens, one.output_tokens) for one in arrivals
    ]
    prompts = [one.prompt for one in made]
    assert prompts[1][:32] == prompts[2][:32]
    assert prompts[1][32:] != prompts[2][32:40]
