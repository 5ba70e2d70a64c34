"""The connector together with vLLM's other features, between real servers."""

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kit import cluster
from tests.kit.composed import ATOL, NIXL, OWN, Cluster, check, prompts
from tests.kit.metrics import scrape
from tests.kit.parity import PREFILL_PARAMS, Completion, CompletionError, compare, complete, post
from tests.kit.tiny_blip import image_url, write_tiny_blip

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# Nats: another prompt's answer is further away in bfloat16, the same one computed in other steps is
# not (`test_tiny_model.py`).
VISIBLE = 0.2
ALIGN = ["--mamba-cache-mode", "align", "--enable-prefix-caching"]
NO_PREFIXES = ["--no-enable-prefix-caching"]
HAS_AVX512 = "avx512" in Path("/proc/cpuinfo").read_text()


def test_another_connector_beside_ours(composed: Cluster) -> None:
    child = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(composed.folder / "store")},
    }
    pair = composed.pair(composed.model("llama"), child=child)
    check(pair)
    (prompt, _), no_logprobs = prompts(), {"logprobs": None}
    name, url = cluster.MODEL_NAME, pair.decode.url
    own = complete(url, name, prompt, extra={**OWN, **no_logprobs})
    before = scrape(url)
    got = cluster.disaggregated(pair.prefill.url, url, name, prompt, extra=no_logprobs)
    assert got.token_ids == own.token_ids
    assert scrape(url).minus(before).total(f"{NIXL}first_tokens_total", way="prefill") == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_data_parallelism(composed: Cluster, side: str) -> None:
    """Two ranks on one side, and with them two API servers, which show what both ranks count."""
    two = ["--data-parallel-size", "2", "--max-num-seqs", "8"]
    args: dict[str, Any] = {side: two}
    pair = composed.pair(composed.model("llama"), **args)
    assert all("shm_queue" in server.active() for server in (pair.prefill, pair.decode))
    for _ in range(2):
        check(pair)
    numbers = random.Random(17)
    name, url = cluster.MODEL_NAME, pair.decode.url
    asked = [[numbers.randrange(256) for _ in range(100)] for _ in range(6)]
    own = [complete(url, name, prompt, extra=OWN) for prompt in asked]

    def ask(prompt: Sequence[int]) -> Completion:
        return cluster.disaggregated(pair.prefill.url, url, name, prompt)

    with ThreadPoolExecutor(len(asked)) as threads:
        got = list(threads.map(ask, asked))
    assert [one for one in map(compare, own, got, [ATOL] * len(own)) if not one.equal] == []
    shown = scrape(pair.decode.url if side == "decode" else pair.prefill.url)
    busy = "bytes_total" if side == "decode" else "lease_age_seconds_count"
    for engine in ("0", "1"):
        assert shown.total(f"{NIXL}failures_total", engine=engine) == 0
        assert shown.total(f"{NIXL}{busy}", engine=engine) > 0, f"rank {engine} had no request"
        assert shown.total(f"{NIXL}transfers_in_flight", engine=engine) == 0
    if side == "decode":
        assert shown.total(f"{NIXL}peers", state="ready") == 2  # each rank knows the prefill worker


@pytest.mark.parametrize("sides", ["both", "decode", "prefill"])
def test_states_for_every_block(composed: Cluster, sides: str) -> None:
    """Of gated delta nets, whose kernels for CPUs compute in bfloat16."""
    args: dict[str, Any] = {
        side: ALIGN if sides in (side, "both") else NO_PREFIXES for side in ("prefill", "decode")
    }
    pair = composed.pair(composed.model("qwen3next"), **args)
    for _ in range(2):  # the second time, of what the prefix cache has of the loaded blocks
        check(pair, atol=VISIBLE)


@pytest.mark.skipif(not HAS_AVX512, reason="vLLM serves FP8 KV caches on CPUs with AVX-512 or AMX")
def test_fp8_kv_cache(composed: Cluster) -> None:
    fp8 = ["--kv-cache-dtype", "fp8"]
    check(composed.pair(composed.model("llama"), fp8, fp8))


def test_images(composed: Cluster) -> None:
    """An image's KV cache is moved with its prompt's, and another image is another prompt."""
    template = composed.folder / "chat.jinja"
    template.write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
    model = write_tiny_blip(composed.folder / "blip")
    args = ["--chat-template", str(template), "--chat-template-content-format", "string"]
    pair = composed.pair(model, args, args)
    red, blue = (255, 0, 0), (0, 0, 255)
    own = {colour: look(pair.decode.url, colour, OWN) for colour in (red, blue)}
    assert own[red][0] != own[blue][0]  # the answer rests on the image
    before = scrape(pair.decode.url)
    got = look(pair.decode.url, red, prefilled(pair.prefill.url, red))
    assert got[0] == own[red][0]
    assert max(abs(one - two) for one, two in zip(got[1], own[red][1], strict=True)) < ATOL
    moved = scrape(pair.decode.url).minus(before)
    assert moved.total(f"{NIXL}bytes_total") > 0
    with pytest.raises(CompletionError):
        look(pair.decode.url, blue, prefilled(pair.prefill.url, red))
    assert look(pair.decode.url, blue, {})[0] == own[blue][0]


def chat(url: str, colour: tuple[int, int, int], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A question about a picture of one colour."""
    content = [
        {"type": "text", "text": "what is it " * 10},
        {"type": "image_url", "image_url": {"url": image_url(*colour)}},
    ]
    body = {
        "model": cluster.MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        **extra,
    }
    return post(f"{url}/v1/chat/completions", body).json()


def look(
    url: str, colour: tuple[int, int, int], extra: Mapping[str, Any]
) -> tuple[list[int], list[float]]:
    """The answer's tokens and their logprobs."""
    (choice,) = chat(url, colour, extra)["choices"]
    return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


def prefilled(url: str, colour: tuple[int, int, int]) -> dict[str, Any]:
    extra = {"max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    return {"kv_transfer_params": chat(url, colour, extra)["kv_transfer_params"]}
