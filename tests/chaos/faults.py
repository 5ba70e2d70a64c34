"""What each kind of fault does.  A fault returns when the peer is back."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.chaos.injectors import abort_requests, send_notifications, send_side_channel_garbage
from tests.chaos.judge import RIGHT
from tests.chaos.load import WITHOUT_LOGPROBS, Load, ask, make_prompts
from tests.chaos.schedule import (
    DECODE,
    DECODE_STEP_SECONDS,
    HANDSHAKE_SECONDS,
    LEASE_SECONDS,
    MAX_TOKENS,
    PREFILL,
    TRANSFER_SECONDS,
    Fault,
)
from tests.chaos.testbed import NUM_BLOCKS, Testbed
from tests.kit import cluster
from tests.kit.parity import Completion, complete, prefill
from tests.kit.served import ADAPTER, OTHER_ADAPTER

NUM_GARBAGE = 200
NUM_ABORTS = 6
LONG_PROMPT = 900
NUM_CROWDING, CROWDING_PROMPT, CROWDING_TOKENS = 13, 400, 300
"""Each is let in with its prompt, and grows; three more can run beside them."""
NUM_DRAINED, DRAINED_TOKENS = 6, 200
LONGEST_MOVE_SECONDS = 0.4
NUM_RELOADED = 4
PREEMPTIONS = "vllm:num_preemptions_total"
FOREIGN: tuple[Mapping[str, Any], ...] = (
    {"remote_engine_id": "nobody"},
    {"remote_incarnation": "earlier"},
    {"remote_block_ids": [[10**9] * 8]},
    {"remote_block_ids": "1, 2"},
    {"remote_fence_slot": 10**9},
    {"remote_host": "no.such.host.invalid"},
    {"tp_size": 7},
)


@dataclass
class Scene:
    """A fault's surroundings; the load judges answers of the fault's own requests."""

    testbed: Testbed
    load: Load
    rng: random.Random

    def reference(self) -> Completion:
        return self.rng.choice(self.load.references)

    def prefill(self, reference: Completion) -> dict[str, Any]:
        """Step 1 without the proxy."""
        return prefill(self.testbed.url(PREFILL), cluster.MODEL_NAME, reference.prompt, 20.0)

    def decode(self, reference: Completion, params: Mapping[str, Any]) -> str:
        """Step 2 without the proxy; returns the verdict."""
        extra = {"kv_transfer_params": dict(params)}
        answer = ask(self.testbed.url(DECODE), reference.prompt, extra=extra)
        return self.load.note(reference, answer)

    def reuse_blocks(self) -> None:
        num_prompts = NUM_BLOCKS * cluster.BLOCK_SIZE // LONG_PROMPT
        for _ in range(num_prompts):
            prompt = make_prompts(1, self.rng.randrange(1 << 30))[0] * 30
            url = self.testbed.url(PREFILL)
            complete(url, cluster.MODEL_NAME, prompt[:LONG_PROMPT], max_tokens=1)


def inject(fault: Fault, testbed: Testbed, load: Load) -> list[str]:
    scene = Scene(testbed, load, random.Random(fault.seed))
    return ACTIONS[fault.kind](scene) or []


def _restart(role: str, *, as_another: bool) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.testbed.restart(role, as_another=as_another)

    return act


def _kill_pair(scene: Scene) -> None:
    for role in (PREFILL, DECODE):
        scene.testbed.signal(role, signal.SIGKILL)
    for role in (PREFILL, DECODE):
        scene.testbed.restart(role, as_another=False)


def _stand_still(role: str, shortest: float, longest: float) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.testbed.signal(role, signal.SIGSTOP)
        time.sleep(scene.rng.uniform(shortest, longest))
        scene.testbed.signal(role, signal.SIGCONT)

    return act


def _side_channel_garbage(scene: Scene) -> None:
    port = scene.testbed.engines[PREFILL].side_channel_port
    send_side_channel_garbage(scene.testbed.host(PREFILL), port, scene.rng, NUM_GARBAGE)


def _rogue_notifications(scene: Scene) -> list[str]:
    engine = scene.testbed.engines[PREFILL]
    where = (scene.testbed.host(PREFILL), engine.side_channel_port, engine.engine_id)
    return send_notifications(where, scene.rng.randrange(1 << 30), NUM_GARBAGE)


def _expired_lease(scene: Scene) -> None:
    reference = scene.reference()
    params = scene.prefill(reference)
    time.sleep(LEASE_SECONDS + 1.0)
    scene.reuse_blocks()
    scene.decode(reference, params)


def _replayed_parameters(scene: Scene) -> list[str]:
    reference = scene.reference()
    params = scene.prefill(reference)
    first = scene.decode(reference, params)
    scene.reuse_blocks()
    scene.decode(reference, params)
    return [] if first == RIGHT else [f"the first use of the parameters was {first}"]


def _foreign_parameters(scene: Scene) -> None:
    for changes in scene.rng.sample(FOREIGN, 3):
        reference = scene.reference()
        scene.decode(reference, {**scene.prefill(reference), **changes})


def _client_aborts(scene: Scene) -> None:
    references = [scene.reference() for _ in range(NUM_ABORTS)]
    abort_requests(scene.testbed.proxy_url, [one.prompt for one in references], scene.rng)


def _network(*, cut: bool) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        link = scene.testbed.link
        assert link is not None, "the schedule leaves this out where there is no link"
        change: AbstractContextManager[None] = link.cut() if cut else link.throttled()
        with change:
            time.sleep(scene.rng.uniform(1.0, TRANSFER_SECONDS + HANDSHAKE_SECONDS + 3.0))

    return act


def _crowd_prefill(scene: Scene) -> list[str]:
    url = scene.testbed.url(PREFILL)
    prompts = [
        (make_prompts(1, scene.rng.randrange(1 << 30))[0] * 30)[:CROWDING_PROMPT]
        for _ in range(NUM_CROWDING)
    ]
    before = scene.testbed.metrics(PREFILL).total(PREEMPTIONS)
    with ThreadPoolExecutor(NUM_CROWDING) as pool:
        for prompt in prompts:
            pool.submit(complete, url, cluster.MODEL_NAME, prompt, max_tokens=CROWDING_TOKENS)
    preempted = scene.testbed.metrics(PREFILL).total(PREEMPTIONS) - before
    return [] if preempted else ["P has preempted nothing"]


def _drain_decode(scene: Scene) -> list[str]:
    testbed, most = scene.testbed, DRAINED_TOKENS
    prompts = [scene.reference().prompt for _ in range(NUM_DRAINED)]
    url, proxy_url = testbed.url(DECODE), testbed.proxy_url
    with ThreadPoolExecutor(NUM_DRAINED) as pool:
        alone = partial(complete, url, cluster.MODEL_NAME, max_tokens=most)
        expected = list(pool.map(alone, prompts))
        asked = [
            pool.submit(
                *(ask, proxy_url, prompt),
                stream=True,
                extra=scene.load.salted(extra),
                max_tokens=most,
            )
            for prompt, extra in zip(prompts, ({}, WITHOUT_LOGPROBS) * NUM_DRAINED, strict=False)
        ]
        time.sleep(scene.rng.uniform(0.5, 1.5))
        testbed.admin.drain(url)
        testbed.admin.undrain(url)
        answers = [one.result() for one in asked]
    verdicts = [scene.load.note(*pair) for pair in zip(expected, answers, strict=True)]
    return [f"a stream was {verdict}" for verdict in verdicts if verdict != RIGHT]


def _kill_while_moving(*, taker: bool) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        testbed = scene.testbed
        drained = testbed.url(DECODE)
        testbed.admin.begin_drain(drained)
        time.sleep(scene.rng.uniform(0.0, LONGEST_MOVE_SECONDS))
        if taker:
            testbed.exchange(DECODE)
        testbed.signal(DECODE, signal.SIGKILL)
        testbed.admin.undrain(drained)
        testbed.restart(DECODE, as_another=False)

    return act


def _reload_adapter(scene: Scene) -> list[str]:
    """Between the two steps of a reload an answer is the decode engine's adapter's, or an error."""
    testbed, problems = scene.testbed, list[str]()
    if not scene.load.pause():
        problems.append("requests did not end within their bound")
    prompts = [scene.reference().prompt for _ in range(NUM_RELOADED)]
    for name in (OTHER_ADAPTER, ADAPTER):
        testbed.load_adapter(DECODE, name)
        alone = partial(complete, testbed.url(DECODE), ADAPTER, max_tokens=MAX_TOKENS)
        expected = [alone(prompt) for prompt in prompts]
        for role in (DECODE, PREFILL):
            testbed.load_adapter(role, name)
            for right in expected:
                answer = ask(testbed.proxy_url, right.prompt, extra={"model": ADAPTER})
                scene.load.note(right, answer)
    scene.load.go_on()
    return problems


_STALL = TRANSFER_SECONDS + HANDSHAKE_SECONDS
ACTIONS: Mapping[str, Callable[[Scene], list[str] | None]] = {
    "kill_prefill": _restart(PREFILL, as_another=False),
    "replace_prefill": _restart(PREFILL, as_another=True),
    "kill_decode": _restart(DECODE, as_another=False),
    "replace_decode": _restart(DECODE, as_another=True),
    "kill_pair": _kill_pair,
    "pause_prefill": _stand_still(PREFILL, 0.2, 1.5),
    "stall_prefill": _stand_still(PREFILL, _STALL + 1.0, _STALL + 4.0),
    "pause_decode": _stand_still(DECODE, 0.2, 1.5),
    "stall_decode": _stand_still(DECODE, DECODE_STEP_SECONDS + 1.0, DECODE_STEP_SECONDS + 2.0),
    "side_channel_garbage": _side_channel_garbage,
    "rogue_notifications": _rogue_notifications,
    "expired_lease": _expired_lease,
    "replayed_parameters": _replayed_parameters,
    "foreign_parameters": _foreign_parameters,
    "client_aborts": _client_aborts,
    "crowd_prefill": _crowd_prefill,
    "drain_decode": _drain_decode,
    "kill_drained": _kill_while_moving(taker=False),
    "kill_taker": _kill_while_moving(taker=True),
    "reload_adapter": _reload_adapter,
    "slow_network": _network(cut=False),
    "cut_network": _network(cut=True),
}
