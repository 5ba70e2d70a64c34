"""Each tiny model in a real engine: its answers depend on its prompt, and on nothing else."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import forked
from tests.kit.cluster import BLOCK_SIZE
from tests.kit.parity import logprob_difference
from tests.kit.prompts import Prompt, almost_the_same, equal_prompts
from tests.kit.servers import CPU_ENVIRON
from tests.kit.tiny_kinds import ALWAYS, KINDS
from tests.kit.tiny_model import write_tiny_model

NUM_PROMPTS, NUM_PROMPT_TOKENS = 2, 200
NUM_GENERATED = 16
ENGINES_SECONDS = 600
# Nats, by data type. Rounding (another tensor-parallel size, a prompt in two steps) moves what is
# computed in float32 by less than 1e-4, in bfloat16 by 0.1.
VISIBLE = {"float32": 0.01, "bfloat16": 0.2}
# One process for all kinds, its engines inside it one after the other: importing vLLM takes far
# longer than a tiny engine. Reads a file of kinds and prompts, writes one of
# [token, top logprobs] a position.
ENGINES = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda look: look()  # else a process for each kind imports vLLM
asked = json.load(open(sys.argv[1]))
answers = {}
for kind, (folder, dtype, backend) in asked["kinds"].items():
    engine = LLM(folder, dtype=dtype, attention_backend=backend or None, enforce_eager=True,
                 block_size=asked["block_size"], max_model_len=1024, max_num_seqs=4,
                 enable_prefix_caching=False, seed=0)
    answers[kind] = []
    for prompt_token_ids, num_tokens in asked["prompts"]:
        prompt = {"prompt_token_ids": prompt_token_ids}
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, logprobs=5, ignore_eos=True
        )
        output = engine.generate(prompt, sampling, use_tqdm=False)[0].outputs[0]
        answers[kind].append([
            [token, {key: value.logprob for key, value in top.items()}]
            for token, top in zip(output.token_ids, output.logprobs)
        ])
    del engine
    cleanup_dist_env_and_memory()
with open(sys.argv[2], "w") as file:
    json.dump(answers, file)
"""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens after one prompt, and the most likely ones of the first position."""

    token_ids: tuple[int, ...]
    first_logprobs: Mapping[int, float]


@dataclass(frozen=True)
class Answers:
    """To the prompts, to the same again, and, of one token, to the prompts with one early token
    changed.

    ``visible`` is the difference in nats that rounding does not make.
    """

    visible: float
    prompts: Sequence[Answer]
    again: Sequence[Answer]
    changed: Sequence[Answer]


def draw_prompts() -> tuple[list[Prompt], list[Prompt]]:
    """Prompts, and the same with another early token."""
    prompts = equal_prompts(NUM_PROMPTS, NUM_PROMPT_TOKENS, seed=0)
    return prompts, [almost_the_same(prompt) for prompt in prompts]


def ask(
    kinds: Sequence[str], folder: Path, prompts: Sequence[tuple[Prompt, int]]
) -> dict[str, list[Answer]]:
    """Answers of a fresh engine of each kind to prompts, of so many tokens, one at a time."""
    folders = {kind: write_tiny_model(folder / kind, kind) for kind in kinds}
    asked = {
        "kinds": {
            kind: (str(folders[kind]), KINDS[kind].cpu_dtype, KINDS[kind].cpu_attention)
            for kind in kinds
        },
        "prompts": prompts,
        "block_size": BLOCK_SIZE,
    }
    question, answers, log = (folder / name for name in ("asked.json", "answers.json", "log"))
    question.write_text(json.dumps(asked))
    program = {"code": ENGINES, "arguments": [str(question), str(answers)]}
    environ = {**os.environ, **CPU_ENVIRON}  # as servers have it, so that they are forked alike
    late = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_COMMEXT": "0"}
    with log.open("wb") as output:
        outputs = (output.fileno(), output.fileno())
        made = forked.start(program, environ, forked.SERVER_MODULES, outputs, late)
    status = made.wait(ENGINES_SECONDS)
    made.stdin.close()
    assert status == 0, log.read_text()[-4000:]
    found = json.loads(answers.read_text())
    return {kind: [to_answer(one) for one in found[kind]] for kind in kinds}


def to_answer(positions: Sequence[tuple[int, Mapping[str, float]]]) -> Answer:
    first = {int(token): value for token, value in positions[0][1].items()}
    return Answer(tuple(token for token, _ in positions), first)


OTHERS = [name for name, kind in KINDS.items() if kind.on_cpus and name not in ALWAYS]


@pytest.fixture(
    scope="module",
    params=[ALWAYS, pytest.param(OTHERS, marks=pytest.mark.long)],
    ids=["of make test", "others"],
)
def all_answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answers]:
    prompts, changed = draw_prompts()
    asked = [(prompt, NUM_GENERATED) for prompt in prompts * 2] + [(one, 1) for one in changed]
    found = ask(request.param, tmp_path_factory.mktemp("kinds"), asked)
    n = NUM_PROMPTS
    return {
        kind: Answers(VISIBLE[KINDS[kind].cpu_dtype], one[:n], one[n : 2 * n], one[2 * n :])
        for kind, one in found.items()
    }


def test_an_early_token_changes_the_first_one(all_answers: dict[str, Answers]) -> None:
    for kind, answers in all_answers.items():
        for one, other in zip(answers.prompts, answers.changed, strict=True):
            difference = logprob_difference(one.first_logprobs, other.first_logprobs)
            assert difference > answers.visible, kind


def test_the_same_prompt_gives_the_same(all_answers: dict[str, Answers]) -> None:
    for kind, answers in all_answers.items():
        assert answers.prompts == answers.again, kind


def test_greedy_output_is_varied(all_answers: dict[str, Answers]) -> None:
    for kind, answers in all_answers.items():
        assert len({one.token_ids for one in answers.prompts}) == NUM_PROMPTS, kind
        assert all(len(set(one.token_ids)) > NUM_GENERATED // 4 for one in answers.prompts), kind
