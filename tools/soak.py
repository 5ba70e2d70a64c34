"""Hours of low load on two engines a role, with a fault every few minutes, as samples in a file.

    python -m tools.soak --seconds 28800 --samples benchmarks/results/soak.jsonl

appends a line every 30 s. It goes on where the file ends: seconds, faults and answers are those of
all runs. Faults come to one engine of each role; the other one and the proxy live as long as the
run. Exit status: 1 where an answer of this run was wrong or late, or a fault left a problem.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.census import take_census
from tests.chaos.faults import inject
from tests.chaos.judge import LATE, WRONG, Answer, first
from tests.chaos.load import Load, ask, make_prompts, take_references
from tests.chaos.recovery import recover
from tests.chaos.report import describe
from tests.chaos.schedule import KINDS, MAX_TOKENS, PREFILL, SPARES, STREAMS, Scenario, plan_faults
from tests.chaos.talk import take_talks, write_options
from tests.chaos.testbed import Testbed
from tests.kit.parity import Completion
from tests.kit.served import SERVED

SAMPLE_SECONDS, WINDOW_SECONDS, BOUND_SECONDS = 30.0, 300.0, 60.0
NUM_CLIENTS, PAUSE_SECONDS, NUM_KNOWN, LONGEST = 2, 2.0, 24, 96
# The other engine of the role would be killed, whose memory is to be seen for hours.
LEFT_OUT = "kill_taker"
TIMED = {"first_token_ms": 1, "short_ms": MAX_TOKENS}
BEFORE = {"run": 0, "seconds": 0.0, "faults": 0, "problems": 0, "requests": {}}


@dataclass
class TimedLoad(Load):
    """A third of the requests is for one token, a third for `MAX_TOKENS`; *took* has their time."""

    took: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=10_000))

    def note(self, reference: Completion, answer: Answer) -> str:
        self.took.append((time.monotonic(), len(reference.token_ids), answer.seconds))
        return super().note(reference, answer)

    def _ask(self, rng: random.Random) -> str:
        if not (number := rng.choice((*TIMED.values(), 0))):
            return super()._ask(rng)
        right = first(rng.choice(self.known).right, number)
        options = {"stream": rng.random() < 0.5, "timeout_seconds": self.bound_seconds}
        return self.note(right, ask(self.url, right.prompt, max_tokens=number, **options))

    def milliseconds(self, num_tokens: int) -> list[float]:
        """Median and 99th percentile of answers of a length in the last `WINDOW_SECONDS`."""
        since = time.monotonic() - WINDOW_SECONDS
        took = sorted(took for at, number, took in self.took if number == num_tokens and at > since)
        return [round(1e3 * took[int(part * len(took))], 1) for part in (0.5, 0.99) if took]


def processes(testbed: Testbed) -> dict[str, list[float]]:
    """Number of its start, MiB of private memory, descriptors and threads of each server."""
    found: dict[str, list[float]] = {}
    engines = (*testbed.engines.values(), *testbed.spares.values())
    servers = [(one.name, one.generation, one.running) for one in engines]
    for name, generation, server in (("proxy", 1, testbed.proxy), *servers):
        if server is not None and (now := take_census(server.pids())).heap_bytes:
            mib = round(now.heap_bytes / 2**20, 2)
            found[name] = [generation, mib, now.descriptors, now.threads]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=28_800, help="of this run")
    parser.add_argument("--pause", type=float, default=240.0, help="seconds between faults")
    parser.add_argument("--samples", type=Path, default=Path("benchmarks/results/soak.jsonl"))
    args = parser.parse_args()
    lines = args.samples.read_text().splitlines() if args.samples.exists() else []
    state = json.loads(lines[-1]) if lines else {**BEFORE}
    number = state["run"] = state["run"] + 1
    before, served, stop = state["problems"], SERVED["llama"], threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="commext-soak-")))
        model = served.write(folder, "float32")
        scenario = Scenario(
            *(1, 0, 0),
            namespaces=False,
            spares=True,
            streams=True,
            args=(*served.cpu_options(model), *write_options(folder)),
            proxy_args=("--health-interval", "2"),
        )
        testbed = Testbed(scenario, model, folder)
        stack.callback(testbed.stop)
        testbed.start()
        url = testbed.url(PREFILL)
        load = TimedLoad(
            testbed.proxy_url,
            take_references(url, make_prompts(NUM_KNOWN, number), LONGEST),
            *(number, LONGEST, BOUND_SECONDS, PAUSE_SECONDS),
            talks=take_talks(url, NUM_KNOWN, MAX_TOKENS, number),
        )
        began, requests = time.monotonic(), state["requests"]

        def write_samples() -> None:
            with args.samples.open("a") as file:
                while not stop.wait(SAMPLE_SECONDS):
                    sample = {
                        **state,
                        "seconds": round(state["seconds"] + time.monotonic() - began, 1),
                        "requests": dict(sorted((load.verdicts + Counter(requests)).items())),
                        **{name: load.milliseconds(tokens) for name, tokens in TIMED.items()},
                        "dev_shm": sum(1 for _ in Path("/dev/shm").iterdir()),
                        "processes": processes(testbed),
                    }
                    print(json.dumps(sample, separators=(",", ":")), file=file, flush=True)

        load.start(NUM_CLIENTS)
        stack.callback(stop.set)
        threading.Thread(target=write_samples, daemon=True).start()
        kinds = [one.name for one in KINDS.values() if one.needs in ("", SPARES, STREAMS)]
        kinds.remove(LEFT_OUT)
        done, num = state["faults"], int(args.seconds / args.pause)
        for fault in plan_faults(1, done + num, kinds)[done:]:
            time.sleep(max(0.0, min(args.pause, began + args.seconds - time.monotonic())))
            if time.monotonic() >= began + args.seconds:
                break
            problems = inject(fault, testbed, load)
            recovery = recover(testbed, load, time.monotonic())
            problems += [*testbed.deaths(), *([] if recovery.succeeded else ["not back"])]
            state["faults"], state["problems"] = fault.number, state["problems"] + len(problems)
            print(f"{fault.number} {fault.kind}: {describe(recovery)}; {problems}", flush=True)
        time.sleep(max(0.0, began + args.seconds - time.monotonic()))
        load.stop()
    print(*load.samples, dict(load.errors), sep="\n")
    return 1 if state["problems"] > before or load.verdicts[WRONG] or load.verdicts[LATE] else 0


if __name__ == "__main__":
    sys.exit(main())
