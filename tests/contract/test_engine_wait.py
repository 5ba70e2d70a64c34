"""When an engine with nothing to compute steps and when it sleeps: vLLM's own step, counted."""

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.engine import core as vllm_core

from vllm_commext.compat import engine_wait, fits, hooks, monkey_patch
from vllm_commext.compat.engine_wait import FLUSH_STEPS, EngineWait
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl import wakeup as wakeup_module
from vllm_commext.nixl.wakeup import WakeupSocket, notifier

HELD = SimpleNamespace(request_id="held", is_finished=lambda: True)
LOADING = SimpleNamespace(request_id="loading", is_finished=lambda: False)
NEW = SimpleNamespace(request_id="new", is_finished=lambda: False)


class Core:
    """An engine of vLLM's, whose scheduler has what a test gives it and whose steps are counted."""

    def __init__(self, wakeup: WakeupSocket, *requests: Any) -> None:
        self.news = False
        self.num_steps = 0
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.engines_running, self.batch_queue_size = False, 1
        self.step_fn = self._count
        self.on_step: Callable[[], None] = lambda: None
        self.scheduler = SimpleNamespace(
            running=[],
            finished_req_ids=set(),
            requests={one.request_id: one for one in requests},
            has_requests=lambda: True,
            connector=SimpleNamespace(engine_wait=EngineWait(wakeup, cast(Any, self))),
        )

    def _count(self) -> tuple[dict[int, Any], bool]:
        self.num_steps += 1
        self.on_step()
        return {}, False

    def post_step(self, model_executed: bool) -> None:
        """Nothing follows a step here."""

    def has_news(self) -> bool:
        return self.news

    def is_loading(self, request_id: str) -> bool:
        return request_id == "loading"

    def turn(self, count: int = 1) -> int:
        """Turns of vLLM's loop, without its look at the queue; steps that were taken."""
        before = self.num_steps
        for _ in range(count):
            vllm_core.EngineCoreProc._process_engine_step(self)  # pyright: ignore
        return self.num_steps - before


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    engine_wait.install()
    engine_wait.install()
    yield
    monkey_patch.restore(engine_wait.SYMBOL)


@pytest.fixture(name="wakeup")
def _wakeup(monkeypatch: pytest.MonkeyPatch) -> Iterator[WakeupSocket]:
    wakeup = WakeupSocket(num_workers=1)
    yield wakeup
    wakeup.close()


@pytest.fixture(name="waits")
def _waits(wakeup: WakeupSocket, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every wait that is made, with its outcome; none of them sleeps."""
    made: list[bool] = []
    real = wakeup.wait
    monkeypatch.setattr(wakeup_module, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(wakeup_module, "LOOK_SECONDS", 0.0)

    def wait(arrivals: queue.Queue[Any]) -> bool:
        made.append(real(arrivals))
        return made[-1]

    monkeypatch.setattr(wakeup, "wait", wait)
    return made


@pytest.fixture(name="pauses")
def _pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that vLLM makes after a step without tokens."""
    made: list[float] = []
    monkeypatch.setattr("vllm.v1.engine.core.time.sleep", made.append)
    return made


@pytest.mark.parametrize("requests", [[HELD], [LOADING], [HELD, LOADING]])
def test_an_engine_that_only_holds_or_loads_waits_before_each_step(
    requests: list[Any], wakeup: WakeupSocket, waits: list[bool]
) -> None:
    core = Core(wakeup, *requests)
    assert core.turn(FLUSH_STEPS) == FLUSH_STEPS
    assert waits == []
    assert core.turn(10) == 10
    assert waits == [False] * 10


@pytest.mark.parametrize(("under_way", "num_steps"), [(1, 3), (2, 3), (3, 4), (5, 6)])
def test_what_is_under_way_is_flushed_before_the_first_wait(
    under_way: int, num_steps: int, wakeup: WakeupSocket, waits: list[bool]
) -> None:
    """vLLM keeps a step for each pipeline stage, and one more, under way."""
    core = Core(wakeup, HELD)
    core.batch_queue_size = under_way
    assert core.turn(num_steps) == num_steps
    assert waits == []
    core.turn()
    assert len(waits) == 1


def test_it_really_sleeps(wakeup: WakeupSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait of half a minute, ended by a notification of the last step's."""
    monkeypatch.setattr(wakeup_module, "MAX_WAIT_SECONDS", 30.0)
    core = Core(wakeup, HELD)
    notify = notifier(wakeup.address, 0)
    core.on_step = lambda: notify() if core.num_steps == FLUSH_STEPS else None
    assert core.turn(2 * FLUSH_STEPS) == 2 * FLUSH_STEPS


def test_a_ring_is_followed_by_steps_without_waits_or_pauses(
    wakeup: WakeupSocket, waits: list[bool], pauses: list[float]
) -> None:
    core = Core(wakeup, LOADING)
    core.turn(FLUSH_STEPS + 1)
    del pauses[:]
    notify = notifier(wakeup.address, 0)
    notify()
    while not waits[-1]:
        core.turn()
    num_waits = len(waits)
    del pauses[:]
    assert core.turn(FLUSH_STEPS - 1) == FLUSH_STEPS - 1
    assert len(waits) == num_waits
    assert pauses == []
    core.turn()
    assert len(waits) == num_waits + 1


def test_what_arrives_is_looked_at_before_the_step(wakeup: WakeupSocket, waits: list[bool]) -> None:
    core = Core(wakeup, HELD)
    core.turn(FLUSH_STEPS)
    core.input_queue.put("request")
    assert core.turn(3) == 0
    core.input_queue.get()
    assert core.turn() == 1


def test_nothing_is_waited_for_while_there_is_something_to_do(
    wakeup: WakeupSocket, waits: list[bool], pauses: list[float]
) -> None:
    core = Core(wakeup, HELD)
    reasons: list[tuple[Any, str, Any, Any]] = [
        (core.scheduler, "running", [NEW], []),
        (core.scheduler, "finished_req_ids", {"a"}, set()),
        (core.scheduler, "requests", {"held": HELD, "new": NEW}, {"held": HELD}),
        (core.scheduler, "requests", {}, {"held": HELD}),
        (core, "engines_running", True, False),
        (core, "news", True, False),
    ]
    for owner, name, busy, quiet in reasons:
        setattr(owner, name, busy)
        assert core.turn(3 * FLUSH_STEPS) == 3 * FLUSH_STEPS, name
        assert waits == [], name
        setattr(owner, name, quiet)
    assert len(pauses) == len(reasons) * 3 * FLUSH_STEPS


def test_ranks_of_data_parallelism_keep_vllms_word_on_whether_the_model_ran(
    wakeup: WakeupSocket, waits: list[bool]
) -> None:
    core = Core(wakeup, HELD)
    core.dp_group = None  # pyright: ignore
    process = vllm_core.EngineCoreProc._process_engine_step  # pyright: ignore
    ran = [process(core) for _ in range(2 * FLUSH_STEPS)]  # pyright: ignore
    assert not any(ran)
    assert waits


def test_a_step_that_does_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkey_patch.restore(engine_wait.SYMBOL)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "vllm_version", lambda: "0.99.0")
        patch.setattr(fits, "compare", lambda *args: ("0.33", [engine_wait.SYMBOL]))
        patch.setattr(vllm_core.EngineCoreProc, "_process_engine_step", lambda self: False)
        with pytest.raises(UnsupportedError, match=r"_process_engine_step not as in vLLM 0\.33"):
            engine_wait.install()
        assert not monkey_patch.is_patched(engine_wait.SYMBOL)
    engine_wait.install()


def test_another_connectors_engine_is_left_alone(wakeup: WakeupSocket, waits: list[bool]) -> None:
    core = Core(wakeup, HELD)
    core.scheduler.connector = object()
    core.turn(3 * FLUSH_STEPS)
    core.scheduler.connector = None
    core.turn(3 * FLUSH_STEPS)
    assert waits == []
