"""Speculative decoding on either side: the answers are those of the decode engine alone, and as
many guesses are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.composed import Cluster, check
from tests.kit.metrics import Metrics
from tests.kit.tiny_draft import add_mtp, favour, write_eagle
from tests.kit.tiny_kinds import FULL, SLIDING

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_GUESSES = 3
NUM_FAVOURED = 8
MAX_TOKENS = 60
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def speculation(**config: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"num_speculative_tokens": NUM_GUESSES, **config})]


def drafts(counted: Metrics) -> tuple[float, float]:
    """Drafts, and guesses of them that were right."""
    count = "vllm:spec_decode_num_{}_total".format
    return counted.total(count("drafts")), counted.total(count("accepted_tokens"))


def draft_of(composed: Cluster, method: str, *, window: int = 0) -> tuple[Path, list[str]]:
    """A model that favours few tokens, all but one of its layers with a window where one is given,
    and a draft for it: itself, a random EAGLE head, or a random MTP module of its own."""
    model = draft = favour(composed.model("llama"), NUM_FAVOURED)
    if method == "mtp":
        return add_mtp(model), speculation(method=method, num_speculative_tokens=1)
    if method == "eagle3":
        draft = write_eagle(composed.folder / "eagle", model)
    if window:
        path = model / "config.json"
        layers = [SLIDING, SLIDING, FULL, SLIDING]
        config = {**json.loads(path.read_text()), "layer_types": layers, "sliding_window": window}
        path.write_text(json.dumps(config))
    return model, speculation(method=method, model=str(draft))


@pytest.mark.parametrize("sides", ["both", "decode"])
def test_ngrams(composed: Cluster, sides: str) -> None:
    ngram = speculation(**NGRAM)
    pair = composed.pair(composed.model("llama"), ngram if sides == "both" else [], ngram)
    for own, loaded in check(pair, max_tokens=MAX_TOKENS):
        assert drafts(own)[1] == drafts(loaded)[1]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_a_draft_with_a_cache_of_its_own(composed: Cluster, method: str) -> None:
    """vLLM fills the first step after a load up to the size of a draft, so there is one more."""
    model, draft = draft_of(composed, method)
    for own, loaded in check(composed.pair(model, draft, draft), max_tokens=MAX_TOKENS):
        (num_own, right), (num_loaded, right_after) = drafts(own), drafts(loaded)
        assert right > 0
        assert right_after == right
        assert num_loaded == num_own + 1


def test_a_draft_beside_sliding_windows(composed: Cluster) -> None:
    """The prompt is cut by a token there, which the EAGLE head has not seen: that costs guesses."""
    model, draft = draft_of(composed, "eagle3", window=64)
    for own, loaded in check(composed.pair(model, draft, draft), max_tokens=MAX_TOKENS):
        assert drafts(own)[1] > 0
        assert abs(drafts(loaded)[1] - drafts(own)[1]) <= NUM_GUESSES
