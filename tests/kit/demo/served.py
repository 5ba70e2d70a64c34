"""The demo with a pretrained model: `vllm-commext serve` with two engines, beside one server. An
engine is killed and another one drained while each gives a long answer."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import httpx

from tests.kit import cluster
from tests.kit.demo.report import Claim, Noise, verdict
from tests.kit.demo.scenario import Scenario
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, chat_completion, complete
from tests.kit.processes import stat_of
from tests.kit.servers import CPU_ENVIRON, Server, free_port

MAX_TOKENS, LONG_TOKENS = 40, 120
# Nats: float32 over 30 layers, added up in another order.
NOISE = Noise(1e-4, allows_ties=True)
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "How many days has a week?",
    "Write a Python function that adds two numbers.",
)
BEGUN_SECONDS = 1.0
"""Of a long answer, before something happens to its engine."""
BACK_SECONDS = 300.0
WINDOW = "in a browser:"
Answer = tuple[str, Completion]


class ServeScenario(Scenario):
    args = (
        *("--max-model-len", "4096", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "256"),
    )

    def run(self) -> bool:
        self.options.folder.mkdir(parents=True, exist_ok=True)
        with _compiling():
            self.model = self.write_model()
        served = self.serve()
        with served:
            served.wait_for_log(WINDOW, BACK_SECONDS)
            print("".join(f"        {line}\n" for line in served.log_text().splitlines()))
            got = [_ask(served, one) for one in QUESTIONS]
            self.say(f"an answer of {LONG_TOKENS} tokens; its engine is killed meanwhile")
            name, answer = _long_while(served, got[0][1].prompt, served.kill)
            with self.plain_server(1) as server:
                self.claim_equal([_ask(server, one) for one in QUESTIONS], got)
                self.long = _long(server, got[0][1].prompt)
            self.claim_went_on("is killed", "resumes", served, name, answer)
            self.claim_back(served, name)
            self.show_drain(served)
            if self.options.show:
                print(f"\n{verdict(self.claims)}\n\nIn a browser: {served.window}", flush=True)
                self.keep([served])
            self.say("SIGTERM: it drains and ends")
            self.claims.append(served.claim_end())
        print(f"\n{verdict(self.claims)}", flush=True)
        return all(claim.held for claim in self.claims)

    def serve(self) -> "Served":
        self.say("starting two engines and the proxy by `vllm-commext serve`")
        port, folder = free_port(), self.options.folder
        command = [sys.executable, "-m", "vllm_commext", "serve", str(self.model)]
        command += ["--engines", "2", "--port", str(port), "--logs", str(folder), "--"]
        command += [*cluster.ENGINE_ARGS, "--served-model-name", cluster.MODEL_NAME, *self.args]
        return Served("serve", command, folder, port=port, environ=CPU_ENVIRON)

    def claim_equal(self, expected: Sequence[Answer], got: Sequence[Answer]) -> None:
        equal = 0
        for question, (text, one), (other, two) in zip(QUESTIONS, expected, got, strict=True):
            print(f"  question     {question}")
            print(f"  one server   {shorten(text, 100)}\n  two engines  {shorten(other, 100)}\n")
            equal += NOISE.compare(one, two).equal
        text, detail = "answers equal one server's", f"{equal} of {len(got)}"
        self.claims.append(Claim(text, equal == len(got), detail))

    def claim_back(self, served: "Served", name: str) -> None:
        self.say(f"waiting until {name} is back")
        deadline = time.monotonic() + BACK_SECONDS
        while not (is_back := served.engine(name)["healthy"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.claims.append(Claim("the engine comes back by itself", is_back, name))

    def show_drain(self, served: "Served") -> None:
        self.say("the same answer; its engine is drained meanwhile")
        prompt = self.long.prompt
        name, answer = _long_while(served, prompt, lambda name: served.admin("drain", name))
        self.claim_went_on("drains", "moves", served, name, answer)
        served.admin("undrain", name)

    def claim_went_on(
        self, what: str, metric: str, served: "Served", name: str, answer: Completion
    ) -> None:
        found = NOISE.compare(self.long, answer)
        went = scrape(served.url).total(f"commext_proxy_{metric}_total", result="resumed")
        text = f"an answer goes on right at the other engine when its own {what}"
        detail = f"{name}; {LONG_TOKENS} tokens, {found if not found.equal else 'all equal'}"
        self.claims.append(Claim(text, found.equal and went == 1, f"{detail}; {went:g} {metric}"))


class Served(Server):
    """`vllm-commext serve` with its admin port."""

    @property
    def window(self) -> str:
        return self.log_text().partition(WINDOW)[2].split()[0]

    def admin(self, path: str, name: str = "") -> Any:
        """Ask the admin port, about the engine of that name."""
        url, _, token = self.window.partition("#")
        options: dict[str, Any] = {"headers": {"Authorization": f"Bearer {token}"}}
        if name:
            options["json"] = {"url": self.engine(name)["url"]}
        method = "POST" if name else "GET"
        return httpx.request(method, url + path, **options).raise_for_status().json()

    def engine(self, name: str) -> Any:
        return next(one for one in self.admin("engines")["engines"] if one["name"] == name)

    def kill(self, name: str) -> None:
        port = self.engine(name)["url"].rpartition(":")[2]
        for pid in self.pids():
            with suppress(OSError):
                if f"\0--port\0{port}\0" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def claim_end(self) -> Claim:
        """End it by SIGTERM, and look at what is left."""
        own, *others = self.pids()
        os.kill(own, signal.SIGTERM)
        deadline = time.monotonic() + BACK_SECONDS
        while Path(f"/proc/{own}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [pid for pid in others if _runs(pid)]
        self.stop()
        detail = f"status {self.exit_status()}; {len(left)} of {len(others)} processes are left"
        return Claim("SIGTERM ends all of it", self.exit_status() == 0 and not left, detail)


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile what each engine imports, so that two that start at once do not both do it."""
    code = "import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker"
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as process:
        try:
            yield
            process.wait(BACK_SECONDS)
        finally:
            process.kill()


def _long_while(
    served: Served, prompt: Sequence[int], act: Callable[[str], object]
) -> tuple[str, Completion]:
    """The engine that a long answer began at, to which *act* happens meanwhile, and the answer."""
    engines: list[str] = []

    def on_begin(headers: Mapping[str, str]) -> None:
        time.sleep(BEGUN_SECONDS)
        engines.append(headers["X-Commext-Decode"])
        act(engines[0])

    answer = _long(served, prompt, on_begin)
    return engines[0], answer


def _runs(pid: int) -> bool:
    """False of a process that has ended, even if its parent has not yet taken notice."""
    with suppress(OSError):
        return stat_of(f"/proc/{pid}")[0] not in "ZX"
    return False


def _ask(server: Server, question: str) -> Answer:
    return chat_completion(server.url, cluster.MODEL_NAME, question, max_tokens=MAX_TOKENS)


def _long(
    server: Server,
    prompt: Sequence[int],
    on_begin: Callable[[Mapping[str, str]], object] | None = None,
) -> Completion:
    return complete(
        *(server.url, cluster.MODEL_NAME, prompt),
        max_tokens=LONG_TOKENS,
        stream=True,
        on_begin=on_begin,
    )
