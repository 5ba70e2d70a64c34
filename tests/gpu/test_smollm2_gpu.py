"""A pretrained model in bfloat16, prefill on one GPU and decode on another:
SmolLM2-135M-Instruct, of which the demo serves float32 on CPUs. The oracle is what the decode
engine answers by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.cluster import PATIENT_PROXY_ARGS
from tests.kit.demo.chat import ABOUT_A_FILE, LICENSE, OTHERS, QUESTIONS, Answer, side_by_side
from tests.kit.gpu_checks import NUM_GPUS, needs_gpus
from tests.kit.gpu_engines import EngineKind, gpu_server
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import chat_completion, compare, near_enough
from tests.kit.servers import ProxyServer, Server, VllmServer
from tests.kit.smollm2 import write_smollm2
from vllm_commext.errors import UnsupportedError

pytest.importorskip("vllm", reason="vLLM is not installed")

MAX_TOKENS = 40
KIND = EngineKind(1024, ("--max-model-len", "4096"))
ASKED = [*QUESTIONS, f"{LICENSE.read_text()}\n{ABOUT_A_FILE}"]
NIXL = "vllm:commext_nixl_"

pytestmark = [needs_gpus(1), pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Pair:
    """A decode engine, and the proxy before it and a prefill engine."""

    model: str
    decode: VllmServer
    proxy: ProxyServer

    def answers(self, server: Server, questions: list[str]) -> list[Answer]:
        asked = [
            chat_completion(server.url, self.model, question, max_tokens=MAX_TOKENS)
            for question in questions
        ]
        return [Answer(text, completion) for text, completion in asked]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp("smollm2")
    try:
        model = write_smollm2()
    except UnsupportedError as error:
        pytest.skip(str(error))
    prefill = gpu_server("P1", "0", model, folder, KIND)
    decode = gpu_server("D1", str(min(NUM_GPUS, 2) - 1), model, folder, KIND)
    with prefill, decode:
        proxy = ProxyServer(
            "proxy", [prefill.url], [decode.url], folder, args=list(PATIENT_PROXY_ARGS)
        )
        with proxy:
            yield Pair(str(model), decode, proxy)


def test_answers_are_the_decode_engines_own(pair: Pair, matrix: Callable[[str], None]) -> None:
    """Those to another question, the control, are not."""
    own = pair.answers(pair.decode, ASKED)
    again = pair.answers(pair.decode, ASKED)
    before = scrape(pair.decode.url)
    got = pair.answers(pair.proxy, ASKED)
    moved = wait_for_added(pair.decode.url, before, f"{NIXL}handovers_total", at_least=len(ASKED))
    other = pair.answers(pair.proxy, list(OTHERS))
    noise = max(_distance(one, two) for one, two in zip(own, again, strict=True))
    found = max(_distance(one, two) for one, two in zip(own, got, strict=True))
    control = min(_distance(one, two) for one, two in zip(own, other, strict=False))
    matrix(side_by_side(ASKED, own, got))
    matrix(
        f"smollm2 bfloat16: within {found:.3f} nats, own again {noise:.3f}, another question "
        f"{control:.3f}, {moved.total(f'{NIXL}bytes_total'):.0f} bytes"
    )
    assert moved.total(f"{NIXL}failures_total") == 0
    assert moved.total(f"{NIXL}bytes_total") > 0
    for one, two in zip(own, got, strict=True):
        assert near_enough(one.completion, two.completion, max(noise, 0.125))
    assert control > found


def _distance(one: Answer, two: Answer) -> float:
    return compare(one.completion, two.completion).max_logprob
