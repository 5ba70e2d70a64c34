"""Our message queue with the model's layers divided over two workers, and with two engines side by
side: the tokens are those of vLLM's queue.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit import cluster
from tests.kit.layouts import UNCOMPILED
from tests.kit.parity import complete
from tests.kit.prompts import prompt_set
from tests.kit.servers import VllmServer

pytestmark = pytest.mark.long  # four servers
PROMPTS = prompt_set(6, seed=5, block_size=cluster.BLOCK_SIZE)

WORKERS = re.compile(r"^\(VllmWorker-\d+ pid=(\d+)\).*commext: shm_queue active", re.MULTILINE)


@pytest.mark.parametrize(
    ("args", "environ"),
    [
        (["--pipeline-parallel-size", "2", "--no-enforce-eager"], UNCOMPILED),
        (["--data-parallel-size", "2"], {}),
    ],
    ids=["pipeline", "data"],
)
def test_the_tokens_are_those_of_vllms_queue(
    args: Sequence[str], environ: Mapping[str, str | None], model: Path, tmp_path: Path
) -> None:
    answers: dict[str, list[tuple[int, ...]]] = {}
    for name, toggle in (("theirs", "0"), ("ours", "1")):
        with VllmServer(
            name,
            model,
            tmp_path,
            args=[
                *(*cluster.ENGINE_ARGS, "--served-model-name", cluster.MODEL_NAME),
                *("--distributed-executor-backend", "mp", *args),
            ],
            environ={**environ, "VLLM_COMMEXT_SHM_QUEUE": toggle, "VLLM_LOGGING_LEVEL": "DEBUG"},
        ) as server:
            answers[name] = tokens(server.url)
            workers = set(WORKERS.findall(server.log_text()))
        assert len(workers) == 2 * int(toggle)
    assert answers["ours"] == answers["theirs"]


def tokens(url: str) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        done = pool.map(lambda prompt: complete(url, cluster.MODEL_NAME, prompt), PROMPTS)
        return [completion.token_ids for completion in done]
