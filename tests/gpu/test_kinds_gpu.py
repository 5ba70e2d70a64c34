"""Every kind that is split between prefill and decode engines, on one GPU or more.

For each kind a prefill engine, a decode engine that reads by NIXL and one that reads through
mappings ("m"); with two GPUs also those of tensor-parallel size 2.  Whole prompts are decoded after
the prefill, streamed ones go to both engines at once.  The oracle is what the decode engine answers
by itself (``gpu_engines``), the negative control a request whose loaded blocks are damaged.

    COMMEXT_GPU_KINDS=llama,swa    which kinds (default: all of ``tests/kit/served.py``)
    COMMEXT_GPU_SIDE_BY_SIDE=4     kinds whose engines are up or starting at a time
    COMMEXT_GPU_EAGER=1            without CUDA graphs, which start later
    COMMEXT_GPU_TP=1               no engines of tensor-parallel size 2

What each pair showed is printed at once, a line beginning with "kind"."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.kit import DAMAGE_MARK
from tests.kit.cluster import disaggregated
from tests.kit.gpu_checks import NUM_GPUS, needs_gpus
from tests.kit.gpu_engines import prompts
from tests.kit.kind_engines import Engines, Fleet, Layout
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import Completion, compare, complete, near_enough
from tests.kit.served import SERVED

pytest.importorskip("vllm", reason="vLLM is not installed")

CHUNK_TOKENS = 192
PROMPTS = prompts(3, 3 * CHUNK_TOKENS + 1)
MAX_TOKENS = 8
NIXL = "vllm:commext_nixl_"
HANDOVERS = f"{NIXL}handovers_total"
CHOSEN = os.environ.get("COMMEXT_GPU_KINDS", ",".join(SERVED)).split(",")
WORKING = [name for name in CHOSEN if not SERVED[name].refused]
REFUSED = [name for name in CHOSEN if SERVED[name].refused]
SIDE_BY_SIDE = int(os.environ.get("COMMEXT_GPU_SIDE_BY_SIDE", max(2, (os.cpu_count() or 8) // 4)))
SIZES = "12" if NUM_GPUS > 1 and os.environ.get("COMMEXT_GPU_TP") != "1" else "1"
NUM_USED = min(NUM_GPUS, 2)
GPUS = {"P1": "0", "D1": str(NUM_USED - 1), "P2": "0,1", "D2": "0,1"}
ENGINES = {
    f"{role}{size}{way}": GPUS[f"{role}{size}"]
    for size in SIZES
    for role, way in (("P", ""), ("D", ""), ("D", "m"))
}
PAIRS = [
    (source, target)
    for source in ENGINES
    for target in ENGINES
    if source[0] == "P" and target[0] == "D" and "1" in (source[1], target[1])
]
LAYOUT = Layout(ENGINES, PAIRS, CHUNK_TOKENS, PROMPTS, MAX_TOKENS)
UNBOUNDED = float("inf")
"""Between two sizes with experts to choose tokens may differ altogether."""

pytestmark = [needs_gpus(1), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kinds = {name: SERVED[name] for name in (*WORKING, *REFUSED)}
    made = Fleet(kinds, tmp_path_factory.mktemp("kinds"), LAYOUT, SIDE_BY_SIDE)
    yield made
    made.close()


@pytest.fixture(scope="module", params=WORKING)
def engines(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Engines]:
    try:
        yield fleet.engines(request.param)
    finally:
        fleet.end(request.param)


@dataclass(frozen=True)
class Found:
    """How far answers after loads are from the decode engine's own."""

    nats: float
    same_tokens: int
    near: bool


def judge(own: Sequence[Completion], got: Sequence[Completion], noise: float) -> Found:
    differences = [compare(one, two) for one, two in zip(own, got, strict=True)]
    return Found(
        max(difference.max_logprob for difference in differences),
        sum(difference.tokens_equal for difference in differences),
        all(near_enough(one, two, noise) for one, two in zip(own, got, strict=True)),
    )


def allowed(engines: Engines, prefill: str, decode: str) -> float:
    """How many nats answers may be from the decode engine's own: none, where that answers the same
    a second time and the prefill engine does so too."""
    if prefill[1] != decode[1] and engines.served.chooses_experts:
        return UNBOUNDED
    return 2 * max(own_distances(engines, prefill, decode)) + engines.served.nats


def own_distances(engines: Engines, prefill: str, decode: str) -> tuple[float, float]:
    """How far the decode engine's own answers are from those that it gives a second time, and from
    the prefill engine's own; kernels that add in no fixed order, and those that an engine chooses
    by timing them at its start, do not always round alike."""
    own = engines.own[decode]
    again, prefills = engines.again[decode], engines.own[prefill]
    return max(map(distance, own, again)), max(map(distance, own, prefills))


def distance(one: Completion, two: Completion) -> float:
    return compare(one, two).max_logprob


def ask_whole(engines: Engines, pair: tuple[str, str], prompt: Sequence[int]) -> Completion:
    source, target = (engines.servers[one].url for one in pair)
    return disaggregated(source, target, engines.model_name, prompt, max_tokens=MAX_TOKENS)


def ask_streamed(engines: Engines, pair: tuple[str, str], prompt: Sequence[int]) -> Completion:
    url = engines.proxies[pair].url
    return complete(url, engines.model_name, prompt, max_tokens=MAX_TOKENS)


WAYS = {"whole": ask_whole, "streamed": ask_streamed}


def line_of(engines: Engines, what: str, found: Found, bound: float, moved: Metrics) -> str:
    distance = "equal to the bit" if found.nats == 0.0 else f"within {found.nats:.3f} nats"
    num_bytes, mapped = (moved.total(f"{NIXL}{one}bytes_total") for one in ("", "mapped_"))
    return (
        f"kind {engines.name} {what}: {distance} (allowed {bound:.3f}), "
        f"tokens of {found.same_tokens} of {len(PROMPTS)} answers, {num_bytes:.0f} bytes in "
        f"{moved.total(f'{NIXL}transfer_seconds_count'):.0f} reads, mapped {mapped:.0f}, "
        f"streamed {moved.total(HANDOVERS, way='streamed'):.0f}"
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: ":".join(pair))
def test_answers_are_the_decode_engines_own(
    engines: Engines, pair: tuple[str, str], way: str, matrix: Callable[[str], None]
) -> None:
    target = engines.servers[pair[1]]
    own, bound = engines.own[pair[1]], allowed(engines, *pair)
    before = scrape(target.url)
    got = [WAYS[way](engines, pair, prompt) for prompt in PROMPTS]
    moved = wait_for_added(target.url, before, HANDOVERS, at_least=len(PROMPTS))
    found = judge(own, got, bound)
    again, prefill = own_distances(engines, *pair)
    label = f"{':'.join(pair)} {way} (own again {again:.3f}, prefill engine's {prefill:.3f})"
    matrix(line_of(engines, label, found, bound, moved))
    streamed = len(PROMPTS) if way == "streamed" and engines.served.streams else 0
    assert moved.total(HANDOVERS, way="streamed") == streamed
    assert moved.total(f"{NIXL}failures_total") == 0
    num_bytes = moved.total(f"{NIXL}bytes_total")
    assert num_bytes > 0
    is_mapped = pair[1].endswith("m")
    assert moved.total(f"{NIXL}mapped_bytes_total") == (num_bytes if is_mapped else 0)
    assert found.nats <= bound
    assert bound == UNBOUNDED or found.near


def test_a_damaged_block_shows(engines: Engines, matrix: Callable[[str], None]) -> None:
    """The same prompts, in requests whose loads are damaged after they have come."""
    if not engines.served.shows_damage:
        pytest.skip("its answers differ from one another as much as from damaged ones")
    source, target = (engines.servers[one] for one in ("P1", "D1"))
    before = scrape(target.url)
    got = [
        disaggregated(
            *(source.url, target.url, engines.model_name, prompt),
            max_tokens=MAX_TOKENS,
            extra={"request_id": f"{DAMAGE_MARK}-{number}"},
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    moved = wait_for_added(target.url, before, HANDOVERS, at_least=len(PROMPTS))
    bound = allowed(engines, "P1", "D1")
    found = judge(engines.own["D1"], got, bound)
    matrix(line_of(engines, "P1:D1 damaged", found, bound, moved))
    assert target.log_text().count("damaged blocks") >= len(PROMPTS)
    assert found.nats > bound


@pytest.mark.parametrize("engines", REFUSED, indirect=True)
def test_refused_with_a_clear_line(engines: Engines, matrix: Callable[[str], None]) -> None:
    matrix(f"kind {engines.name} refused: {engines.refusal}")
    assert "start without --speculative-config" in engines.refusal
