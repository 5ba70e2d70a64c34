"""Every kind of group, every length of prompt from one block to four and around the window: what
the decode engine computes from after a load is what a single engine computes from."""

from collections.abc import Iterator

import pytest

from tests.contract.engine_in_memory import (
    ALIGNED_STATE_SPEC,
    LATENT_SPEC,
    NUM_GUESSES,
    Engine,
    Model,
    chunked,
    request_of,
    sliding,
)
from tests.contract.scheduler_engine import BLOCK, FULL_SPEC, STATE_SPEC, TO_PREFILL
from tests.kit.crossed import crossed

MODELS = {
    "full": Model([FULL_SPEC]),
    "latent": Model([LATENT_SPEC]),
    **{f"window of {size}": Model([FULL_SPEC, sliding(size)]) for size in (2, 5, 7, 8, 9, 12)},
    "window alone": Model([sliding(8)]),
    "two windows": Model([FULL_SPEC, sliding(6), sliding(11)]),
    "chunks of 8": Model([FULL_SPEC, chunked(8)]),
    "chunks of 12": Model([FULL_SPEC, chunked(12)]),
    "state": Model([FULL_SPEC, STATE_SPEC]),
    "state in every block": Model([FULL_SPEC, ALIGNED_STATE_SPEC]),
    "state and window": Model([FULL_SPEC, sliding(8), STATE_SPEC]),
    "full, with a draft": Model([FULL_SPEC], drafts=[0]),
    **{
        f"window of {size}, with a draft": Model([FULL_SPEC, sliding(size)], drafts=[0])
        for size in (5, 8)
    },
    "window alone, with a draft in it": Model([sliding(8)], drafts=[0]),
    "two windows, with drafts in all": Model(
        [FULL_SPEC, sliding(6), sliding(11)], drafts=[0, 1, 2]
    ),
}
LENGTHS = range(2, 6 * BLOCK + 2)
TOKENS_A_STEP = (1000, 3)
ALIGNED_TOKENS_A_STEP = (2 * BLOCK, BLOCK)  # vLLM ends steps with blocks to keep their states
MORE_TOKENS = 3 * BLOCK


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture
def engines(model: Model) -> Iterator[tuple[Engine, Engine]]:
    both = Engine(model, "kv_producer"), Engine(model, "kv_consumer")
    yield both
    for engine in both:
        engine.connector.shutdown()


@pytest.mark.parametrize(
    ("tokens_a_step", "num_cached"),
    [
        *crossed(TOKENS_A_STEP, (0, 3 * BLOCK)),
        *(pytest.param(tokens, BLOCK, marks=pytest.mark.long) for tokens in TOKENS_A_STEP),
    ],
)
def test_what_is_computed_after_a_load_starts_from_what_a_single_engine_has(
    engines: tuple[Engine, Engine], tokens_a_step: int, num_cached: int
) -> None:
    prefill, decode = engines
    if ALIGNED_STATE_SPEC in decode.model.specs:
        tokens_a_step = ALIGNED_TOKENS_A_STEP[TOKENS_A_STEP.index(tokens_a_step)]
    for length in LENGTHS:
        check_length(prefill, decode, length, tokens_a_step, min(num_cached, length))


def check_length(
    prefill: Engine, decode: Engine, length: int, tokens_a_step: int, num_cached: int
) -> None:
    """One prompt, of which the decode engine may have cached some, and some tokens after it."""
    warm_up(decode, num_cached)
    first = request_of(f"p{length}", length, TO_PREFILL)
    params = prefill.hand_over(first, tokens_a_step)
    assert params is not None, f"{length} tokens: nothing is offered"
    request = request_of(f"d{length}", length, params)
    num_hit, num_loaded = decode.load(request, prefill)
    most = length if decode.model.keeps_every_token else length - 1
    assert num_loaded == max(0, most - num_hit)
    for more in range(MORE_TOKENS):
        num_right = more % (NUM_GUESSES + 1) if decode.model.drafts else 0
        decode.compute(request, num_right)
        request.append_output_token_ids([more] * (num_right + 1))
    again = request_of(f"again{length}", length)
    decode.compute_prompt(again, tokens_a_step)
    assert prefill.faults == []
    assert decode.faults == [], f"{length} tokens"
    decode.manager.free(again)
    for engine, one in ((prefill, first), (decode, request)):
        engine.forget(one)


def test_a_preempted_request_computes_its_prompt_here(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    length = 4 * BLOCK - 1
    first = request_of("p", length, TO_PREFILL)
    request = request_of("d", length, prefill.hand_over(first, BLOCK))
    decode.load(request, prefill)
    decode.compute(request, num_right=0)
    request.append_output_token_ids(1)
    decode.preempt(request)
    decode.memory.fill(-1)
    decode.manager.reset_prefix_cache()
    assert decode.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    decode.compute_prompt(request, BLOCK)
    assert decode.faults == []


def warm_up(engine: Engine, num_tokens: int) -> None:
    """Leave the prompt's first tokens in the prefix cache, where there is one."""
    if num_tokens:
        request = request_of("warm", num_tokens)
        engine.compute_prompt(request, BLOCK)
        engine.manager.free(request)
