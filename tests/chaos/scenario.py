"""One run from its first server to its report."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

from tests.chaos.faults import LONG_PROMPT, inject
from tests.chaos.load import Known, Load, make_prompts, take_references
from tests.chaos.network import Link, NetworkError, namespace_link
from tests.chaos.recovery import recover
from tests.chaos.report import FaultRecord, RunRecord, describe
from tests.chaos.schedule import (
    ADAPTER,
    DECODE,
    KINDS,
    NAMESPACE,
    PREFILL,
    SPARES,
    STREAMS,
    Fault,
    Scenario,
    plan_faults,
)
from tests.chaos.talk import Talk, take_talks, write_options
from tests.chaos.testbed import Testbed
from tests.kit import cluster
from tests.kit.parity import complete, prefill
from tests.kit.servers import ServerEndedError
from vllm_commext.errors import CommextTimeoutError

WARM_UP_SECONDS = 2.0
NUM_KERNELS = 32
"""Batch sizes for which vLLM keeps oneDNN's kernels, of each shape of a weight: of the tiny Llama
1.2 MiB for each size until then.  A decode engine meets new ones when it has to compute prompts."""


def run(scenario: Scenario, model: Path, folder: Path, say: Callable[[str], None]) -> RunRecord:
    """Run it; every server has ended when this returns. ``say`` takes a line about each fault."""
    record = RunRecord({**vars(scenario), "kinds": len(scenario.kinds)})
    with ExitStack() as stack:
        link = _link(scenario, record, stack)
        has = {
            *("", NAMESPACE if link else "", STREAMS if scenario.streams else ""),
            *(SPARES if scenario.spares else "", ADAPTER if scenario.name else ""),
        }
        kinds = [kind for kind in scenario.kinds if KINDS[kind].needs in has]
        if scenario.talks:
            scenario = replace(scenario, args=[*scenario.args, *write_options(folder)])
        answers = _plain_answers(scenario, model, folder) if scenario.plain_reference else None
        testbed = Testbed(scenario, model, folder, link)
        stack.callback(testbed.stop)
        testbed.start()
        known, talks = answers or _answers_of(testbed.url(PREFILL), scenario)
        load = Load(
            *(testbed.proxy_url, known, scenario.seed, scenario.max_tokens),
            least_seconds=scenario.bound_seconds,
            pause_seconds=scenario.pause_seconds,
            salts=scenario.reuse,
            talks=talks,
        )
        faults = plan_faults(scenario.seed, scenario.num_faults, kinds, scenario.max_delay_seconds)
        started = time.monotonic()
        try:
            _Run(scenario, record, testbed, load, say).go(faults)
        except Exception as error:  # noqa: BLE001 whatever ends the run, what it found is reported
            record.problems.append(f"the run broke off: {type(error).__name__}: {error}")
            load.stop()
        record.seconds = time.monotonic() - started
        record.verdicts, record.errors, record.samples = load.verdicts, load.errors, load.samples
        record.resumes = testbed.streams_by("commext_proxy_resumes_total")
        record.moves = testbed.streams_by("commext_proxy_moves_total")
    return record


def _answers_of(url: str, scenario: Scenario) -> tuple[list[Known], list[Talk]]:
    prompts, name = make_prompts(scenario.num_prompts, scenario.seed), scenario.name
    known = take_references(url, prompts, scenario.max_tokens, name, seeds=scenario.seeds)
    number = scenario.num_prompts if scenario.talks else 0
    return known, take_talks(url, number, scenario.max_tokens, scenario.seed, name)


def _plain_answers(scenario: Scenario, model: Path, folder: Path) -> tuple[list[Known], list[Talk]]:
    args = [*scenario.args, "--no-enable-prefix-caching"]
    environ = cluster.PLAIN_ENVIRON
    with cluster.plain_server("plain", model, folder, args=args, environ=environ) as server:
        return _answers_of(server.url, scenario)


def _link(scenario: Scenario, record: RunRecord, stack: ExitStack) -> Link | None:
    reason = "not asked for"
    if scenario.namespaces:
        try:
            return stack.enter_context(namespace_link())
        except NetworkError as error:
            reason = str(error)
    needing = [kind for kind in scenario.kinds if KINDS[kind].needs == NAMESPACE]
    record.skipped.update(dict.fromkeys(needing, f"no network namespaces: {reason}"))
    return None


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        record: RunRecord,
        testbed: Testbed,
        load: Load,
        say: Callable[[str], None],
    ) -> None:
        self._scenario = scenario
        self._record = record
        self._stage = testbed
        self._load = load
        self._say = say

    def go(self, faults: Sequence[Fault]) -> None:
        self._load.start(self._scenario.num_clients)
        self._warm_up(*self._stage.urls(PREFILL), *self._stage.urls(DECODE))
        self._settle("start", (PREFILL, DECODE))
        deadline = time.monotonic() + self._scenario.max_seconds
        for fault in faults:
            if time.monotonic() > deadline:
                break
            time.sleep(fault.delay_seconds)
            self._one(fault)
        while (
            self._load.verdicts.total() < self._scenario.num_requests
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        self._settle("end", (PREFILL, DECODE), compare=not self._scenario.aimed)
        self._record.problems += [f"end: {one}" for one in self._stage.leaks_of_spares()]
        if self._scenario.streams:
            self._record.settings["streamed"] = streamed = int(self._stage.streamed())
            if not streamed:
                self._record.problems.append("no request was streamed")
        if self._scenario.reuse:
            self._record.settings["reused"] = reused = self._stage.reused()
            if not reused["blocks"]:
                self._record.problems.append("no stream was read from the engine that it left")
        if not self._load.stop():
            self._record.problems.append("clients did not end within their bound")

    def _one(self, fault: Fault) -> None:
        killed = "" if self._scenario.aimed else KINDS[fault.kind].kills
        if self._scenario.aimed:
            self._stage.aim(random.Random(fault.seed))
        if killed:
            self._settle(f"before fault {fault.number}", (killed,), compare=True)
            time.sleep(fault.delay_seconds / 2)
        if self._scenario.reuse:
            self._stage.count_reused()
        started = time.monotonic()
        problems = self._inject(fault)
        back = time.monotonic()
        recovery = recover(self._stage, self._load, back)
        problems += self._stage.deaths()
        if not self._scenario.aimed:
            self._stage.sample_memory()
        self._record.faults.append(FaultRecord(fault.number, fault.kind, recovery, tuple(problems)))
        self._say(
            f"{fault.number:4d} {fault.kind:22s} {back - started:5.1f} s, {describe(recovery)}; "
            f"{dict(self._load.verdicts)}"
            f"{''.join(f'; PROBLEM: {one}' for one in problems)}"
        )
        if killed:
            self._warm_up(self._stage.url(killed))
            self._settle(f"after fault {fault.number}", (killed,))

    def _inject(self, fault: Fault) -> list[str]:
        try:
            return inject(fault, self._stage, self._load)
        except (CommextTimeoutError, ServerEndedError):
            raise  # an engine did not come back: nothing more can be seen
        except Exception as error:  # noqa: BLE001 the fault's own requests may fail in any way
            return [f"the fault itself failed: {type(error).__name__}: {error}"]

    def _warm_up(self, *urls: str) -> None:
        """Let new engines allocate what they will need: work space for long prompts among it, and
        connections to all engines of the other role, as some would meet long after the start."""
        model, prompt = cluster.MODEL_NAME, (65,) * 2 * cluster.BLOCK_SIZE
        for url in urls:
            complete(url, model, (65,) * LONG_PROMPT, max_tokens=2)
            for size in range(1, NUM_KERNELS + 1):
                complete(url, model, (65,) * size, max_tokens=1)
        for source, target in product(self._stage.urls(PREFILL), self._stage.urls(DECODE)):
            params = {"kv_transfer_params": prefill(source, model, prompt)}
            complete(target, model, prompt, max_tokens=2, extra=params)
        time.sleep(WARM_UP_SECONDS)

    def _settle(self, when: str, roles: Sequence[str], *, compare: bool = False) -> None:
        problems: list[str] = []
        if not self._load.pause():
            problems.append("requests did not end within their bound")
        problems += self._stage.wait_quiet()
        for role in roles:
            if compare:
                problems += self._stage.compare_with_baseline(role)
            else:
                self._stage.take_baseline(role)
        self._record.problems += [f"{when}: {problem}" for problem in problems]
        self._load.go_on()
