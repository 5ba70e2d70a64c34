"""A server with an earlier release of this package beside one with this one: neither can use the
other's parameters, both say so in one line, and every answer is right.  COMMEXT_TEST_OLDER is the
folder that the earlier release is installed in; `make older` sets it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT, cluster
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import CompletionError, compare, complete
from tests.kit.prompts import prompt_set
from tests.kit.servers import VllmServer

OLDER = os.environ.get("COMMEXT_TEST_OLDER", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not OLDER, reason="`make older` names the folder of an earlier release"),
]
NUM_PROMPTS = 6
LOG_SECONDS = 60.0
BLOCKS = "vllm:commext_nixl_blocks_total"
FAILURES = "vllm:commext_nixl_failures_total"
FROM = {"older": OLDER, "here": str(ROOT)}
# What each says of the other: the one that is to read, and the one that has prefilled.
LINES = {
    ("older", "here"): ("expected remote_protocol 4, got none: install the same", "protocol"),
    ("here", "older"): ("KV cache not loaded", "protocol"),
}


def start(name: str, policy: str, model: Path, folder: Path) -> VllmServer:
    server = cluster.engine_server(
        f"{name}-{policy}",
        model,
        folder,
        cluster.kv_transfer_config("kv_both", policy=policy),
        args=["--no-enable-prefix-caching"],
        environ={"PYTHONPATH": FROM[name]},
    )
    # The release is the one that PYTHONPATH names, not what lies in this folder; and it is not
    # forked from a process that has imported another one.
    server.command[1:1] = ["-P"]
    return server


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], VllmServer]]:
    folder = tmp_path_factory.mktemp("older")
    made = {
        (name, policy): start(name, policy, model, folder)
        for name in FROM
        for policy in ("recompute", "fail")
    }
    with cluster.all_ready(made.values()):
        yield made


@pytest.mark.parametrize("name", FROM)
def test_each_server_has_the_release_that_it_should(name: str) -> None:
    code = "import vllm_commext; print(vllm_commext.__file__)"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": FROM[name]},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    ).stdout
    assert Path(told.strip()).is_relative_to(FROM[name])


@pytest.mark.parametrize(("source", "target"), [("older", "here"), ("here", "older")])
def test_between_releases_every_answer_is_right_and_both_say_why_nothing_was_read(
    servers: dict[tuple[str, str], VllmServer], source: str, target: str
) -> None:
    prefill, decode = servers[source, "recompute"], servers[target, "recompute"]
    before = scrape(decode.url)
    starts = len(prefill.log_text()), len(decode.log_text())
    prompts = prompt_set(NUM_PROMPTS, seed=7, block_size=cluster.BLOCK_SIZE)
    for prompt in prompts:
        got = cluster.disaggregated(prefill.url, decode.url, cluster.MODEL_NAME, prompt)
        difference = compare(complete(prefill.url, cluster.MODEL_NAME, prompt), got)
        assert difference.equal, difference
    added = wait_for_added(decode.url, before, FAILURES, at_least=NUM_PROMPTS)
    assert added.total(FAILURES) == NUM_PROMPTS
    assert added.total(BLOCKS) == 0
    of_decode, of_prefill = LINES[source, target]
    assert of_decode in decode.wait_for_log("KV cache not loaded", LOG_SECONDS, starts[1])
    assert of_prefill in prefill.wait_for_log("refused a frame", LOG_SECONDS, starts[0])
    for server in (prefill, decode):
        answer = complete(server.url, cluster.MODEL_NAME, prompts[0])
        assert len(answer.token_ids) == 16, "both go on serving"


@pytest.mark.parametrize(("source", "target"), [("older", "here"), ("here", "older")])
def test_with_the_policy_fail_the_client_gets_an_error_and_no_answer(
    servers: dict[tuple[str, str], VllmServer], source: str, target: str
) -> None:
    (prompt,) = prompt_set(1, seed=9, block_size=cluster.BLOCK_SIZE)
    urls = servers[source, "recompute"].url, servers[target, "fail"].url
    with pytest.raises(CompletionError) as refused:
        cluster.disaggregated(*urls, cluster.MODEL_NAME, prompt)
    assert refused.value.status == 500
