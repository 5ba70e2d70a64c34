"""The demo with a pretrained model: `vllm-commext serve` with two engines, beside one server. An
engine is killed and another one drained while each gives a long answer."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
BACK_SECONDS = 180.0
WINDOW = "in a browser:"
Answer = tuple[str, Completion]


class ServeScenario(Scenario):
    args = (
        *("--max-model-len", "4096", "--no-enable-prefix-caching"),
        *("--num-gpu-blocks-override", "256"),
    )

    def run(self) -> bool:
        self.options.folder.mkdir(parents=True, exist_ok=True)
        self.model = self.write_model()
        with self.plain_server(1) as server:
            expected = [_ask(server, question) for question in QUESTIONS]
            self.long = _long(server, expected[0][1].prompt)
        served = self.serve()
        with served:
            served.wait_for_log(WINDOW, BACK_SECONDS)
            print("".join(f"        {line}\n" for line in served.log_text().splitlines()))
            self.claim_equal(expected, [_ask(served, one) for one in QUESTIONS])
            self.show_death(served)
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

    def show_death(self, served: "Served") -> None:
        self.say(f"an answer of {LONG_TOKENS} tokens; its engine is killed meanwhile")
        name = self.go_on("resumes", "is killed", served, served.kill)
        began = time.monotonic()
        while not (is_back := served.engine(name)["healthy"]):
            if time.monotonic() > began + BACK_SECONDS:
                break
            time.sleep(0.2)
        detail = f"{name}, after {time.monotonic() - began:.0f} s more"
        self.claims.append(Claim("the engine comes back by itself", is_back, detail))

    def show_drain(self, served: "Served") -> None:
        self.say("the same answer; its engine is drained meanwhile")
        name = self.go_on("moves", "drains", served, lambda name: served.admin("drain", name))
        served.admin("undrain", name)

    def go_on(self, metric: str, what: str, served: "Served", act: Callable[[str], object]) -> str:
        """Have a long answer go on at another engine; its first engine."""
        engines: list[str] = []

        def on_begin(headers: Mapping[str, str]) -> None:
            time.sleep(BEGUN_SECONDS)
            engines.append(headers["X-Commext-Decode"])
            act(engines[0])

        found = NOISE.compare(self.long, _long(served, self.long.prompt, on_begin))
        went = scrape(served.url).total(f"commext_proxy_{metric}_total", result="resumed")
        text = f"an answer goes on right at the other engine when its own {what}"
        detail = f"{engines[0]}; {LONG_TOKENS} tokens, {found if not found.equal else 'all equal'}"
        self.claims.append(Claim(text, found.equal and went == 1, f"{detail}; {went:g} {metric}"))
        return engines[0]


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
