"""``python -m tests.kit.demo``: `vllm-commext serve` with a pretrained model, beside one server.
Prompts are handed over, an engine is killed and one is drained in the middle of answers."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import httpx

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, chat_completion, compare, complete, near_enough
from tests.kit.processes import stat_of
from tests.kit.servers import CPU_ENVIRON, ProxyServer, Server, VllmServer, free_port
from tests.kit.smollm2 import write_smollm2
from vllm_commext.errors import CommextError

ARGS = ["--max-model-len", "4096", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "256"]
IMPORTS = "import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker"
MAX_TOKENS, LONG_TOKENS = 40, 120
COMPUTED = "vllm:prompt_tokens_by_source_total"
COUNTS = "commext_nixl_blocks", "commext_nixl_bytes", "commext_nixl_failures", "generation_tokens"
NOISE = 1e-4
"""Nats: float32 over 30 layers, added up in another order."""
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
STOPPED = "All servers are stopped. `SHOW=1 make demo` leaves them running until Ctrl-C."
Answer = tuple[str, Completion]


class Claim(NamedTuple):
    text: str
    held: bool
    detail: str


def verdict(claims: Sequence[Claim]) -> str:
    """A line a claim, then the verdict."""
    lines = [f"{'ok  ' if one.held else 'FAIL'}  {one.text} ({one.detail})" for one in claims]
    broken = sum(not one.held for one in claims)
    end = f"{broken} of {len(claims)} FAILED" if broken else f"all {len(claims)} ok"
    return "\n".join([*lines, f"VERDICT: {end}"])


def equal(expected: Completion, got: Completion) -> bool:
    """The same tokens with the same log probabilities, up to a token that is as likely."""
    found = compare(expected, got, 2 * NOISE)
    tokens = zip(expected.token_ids, got.token_ids, strict=False)
    is_other = any(one != two for one, two in tokens)
    is_near = is_other and found.max_logprob <= 2 * NOISE
    return found.equal or (is_near and near_enough(expected, got, NOISE))


class Demo:
    """One run, which prints as it goes."""

    def __init__(self, folder: Path, *, stays: bool) -> None:
        self.folder, self.stays = folder, stays
        self.started = time.monotonic()
        self.claims: list[Claim] = []

    def run(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say(f"unpacking SmolLM2 (135M parameters, trained), logs in {self.folder}")
        # What each engine imports, so that two that start at once do not both compile it.
        with subprocess.Popen([sys.executable, "-c", IMPORTS]):
            self.model = write_smollm2()
        with self.serve() as served:
            served.wait_for_log(WINDOW, BACK_SECONDS)
            print("".join(f"        {line}\n" for line in served.log_text().splitlines()))
            got = {"serve": [_ask(served, one) for one in QUESTIONS]}
            got["handed over"] = self.hand_over(served)
            self.say(f"asking for {LONG_TOKENS} tokens, and killing the engine that answers")
            prompt = got["serve"][0][1].prompt
            name, answer = _long_while(served, prompt, served.kill)
            with self.plain_server() as server:
                self.claim_equal([_ask(server, one) for one in QUESTIONS], got)
                self.long = _long(server, prompt)
            self.claim_went_on("is killed", "resumes", served, name, answer)
            self.claim_back(served, name)
            self.show_drain(served)
            if self.stays:
                print(f"\n{verdict(self.claims)}\n\nAPI: {served.url}/v1\nBrowser: {served.window}")
                self.say("everything stays up until Ctrl-C")
                with suppress(KeyboardInterrupt):
                    while served.running():
                        time.sleep(1.0)
            self.say("ending `serve` by SIGTERM")
            self.claims.append(served.claim_end())
        print(f"\n{verdict(self.claims)}\n\n{STOPPED}", flush=True)
        return all(claim.held for claim in self.claims)

    def say(self, text: str) -> None:
        """A progress line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def plain_server(self) -> VllmServer:
        self.say("starting a single server without this package, for reference")
        return cluster.plain_server("single", self.model, self.folder, args=ARGS)

    def serve(self) -> "Served":
        self.say("starting two engines and the proxy by `vllm-commext serve`")
        port, folder = free_port(), self.folder
        command = [sys.executable, "-m", "vllm_commext", "serve", str(self.model)]
        command += ["--engines", "2", "--port", str(port), "--logs", str(folder), "--"]
        command += [*cluster.ENGINE_ARGS, "--served-model-name", cluster.MODEL_NAME, *ARGS]
        return Served("serve", command, folder, port=port, environ=CPU_ENVIRON)

    def hand_over(self, served: "Served") -> list[Answer]:
        """Answers by a proxy with fixed roles, and a claim by the engines' counters."""
        self.say("handing over by another proxy: engine0 computes prompts, engine1 answers")
        urls = [served.engine(name)["url"] for name in ("engine0", "engine1")]
        before = [scrape(url) for url in urls]
        with ProxyServer("roles", urls[:1], urls[1:], self.folder) as proxy:
            answers = [_ask(proxy, one) for one in QUESTIONS]
        added = [scrape(url).minus(one) for url, one in zip(urls, before, strict=True)]
        computed = [one.total(COMPUTED, source="local_compute") for one in added]
        blocks, size, failed, given = (added[1].total(f"vllm:{name}_total") for name in COUNTS)
        num_prompt = sum(len(one.prompt) for _, one in answers)
        num_given = sum(len(one.token_ids) for _, one in answers)
        read = f"{blocks:g} blocks, {size:,.0f} bytes, failures: {failed:g}"
        print(f"        engine0's /metrics: computed {computed[0]:g} of {num_prompt} prompt tokens")
        print(f"        engine1's /metrics: computed {computed[1]:g}, read KV cache: {read}")
        print(f"        engine1's /metrics: generated {given:g} of {num_given} tokens", flush=True)
        held = (computed, failed, given) == ([num_prompt, 0], 0, num_given) and blocks * size > 0
        text = "engine0 computes prompts, engine1 reads their KV cache and answers"
        self.claims.append(Claim(text, held, read))
        return answers

    def claim_equal(self, expected: Sequence[Answer], got: Mapping[str, Sequence[Answer]]) -> None:
        for number, question in enumerate(QUESTIONS):
            print(f"  question     {question}")
            for by, answers in {"one server": expected, **got}.items():
                print(f"  {by:11}  {shorten(answers[number][0], 100)}")
            print()
        equals = {
            by: sum(equal(one[1], two[1]) for one, two in zip(expected, answers, strict=True))
            for by, answers in got.items()
        }
        detail = ", ".join(f"{by}: {number} of {len(expected)}" for by, number in equals.items())
        held = min(equals.values()) == len(expected)
        self.claims.append(Claim("answers equal those of one server", held, detail))

    def claim_back(self, served: "Served", name: str) -> None:
        self.say(f"waiting until {name} is back")
        deadline = time.monotonic() + BACK_SECONDS
        while not (is_back := served.engine(name)["healthy"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.claims.append(Claim("the killed engine restarts by itself", is_back, name))

    def show_drain(self, served: "Served") -> None:
        self.say(f"asking for {LONG_TOKENS} tokens, and draining the engine that answers")
        name, answer = _long_while(served, self.long.prompt, partial(served.admin, "drain"))
        self.claim_went_on("drains", "moves", served, name, answer)
        served.admin("undrain", name)

    def claim_went_on(
        self, what: str, metric: str, served: "Served", name: str, answer: Completion
    ) -> None:
        is_equal = equal(self.long, answer)
        told = "as one server's" if is_equal else str(compare(self.long, answer))
        went = scrape(served.url).total(f"commext_proxy_{metric}_total", result="resumed")
        text = f"an answer goes on correctly at the other engine when its own {what}"
        detail = f"{name}; {LONG_TOKENS} tokens, {told}; {metric}: {went:g}"
        self.claims.append(Claim(text, is_equal and went == 1, detail))


class Served(Server):
    """`vllm-commext serve` with its admin port."""

    @property
    def window(self) -> str:
        return self.log_text().partition(WINDOW)[2].split()[0]

    def admin(self, path: str, name: str = "") -> Any:
        """Ask the admin port, about the engine of that name."""
        url, _, token = self.window.partition("#")
        headers = {"Authorization": f"Bearer {token}"}
        method, body = ("POST", {"url": self.engine(name)["url"]}) if name else ("GET", None)
        answer = httpx.request(method, url + path, headers=headers, json=body)
        return answer.raise_for_status().json()

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
        return Claim("SIGTERM ends everything", self.exit_status() == 0 and not left, detail)


def _long_while(
    served: Served, prompt: Sequence[int], act: Callable[[str], object]
) -> tuple[str, Completion]:
    """The engine that a long answer began at, to which *act* happens meanwhile, and the answer."""
    engines: list[str] = []

    def on_begin(headers: Mapping[str, str]) -> None:
        time.sleep(BEGUN_SECONDS)
        engines.append(headers["X-Commext-Decode"])
        act(engines[0])

    answer = _long(served, prompt, on_begin=on_begin)
    return engines[0], answer


def _runs(pid: int) -> bool:
    """False of a process that has ended, even if its parent has not yet taken notice."""
    with suppress(OSError):
        return stat_of(f"/proc/{pid}")[0] not in "ZX"
    return False


def _ask(server: Server, question: str) -> Answer:
    return chat_completion(server.url, cluster.MODEL_NAME, question, max_tokens=MAX_TOKENS)


def _long(server: Server, prompt: Sequence[int], **options: Any) -> Completion:
    where = server.url, cluster.MODEL_NAME, prompt
    return complete(*where, max_tokens=LONG_TOKENS, stream=True, **options)


def main() -> int:
    """0: everything held; 1: something did not; 2: it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.demo", description=__doc__)
    parser.add_argument("--show", action="store_true", help="leave it up until Ctrl-C")
    logs = "for the servers' logs; default: a temporary one, kept on failure"
    parser.add_argument("--folder", type=Path, help=logs)
    args, held = parser.parse_args(), False
    folder = args.folder or Path(tempfile.mkdtemp(prefix="vllm-commext-demo-"))
    try:
        held = Demo(folder.resolve(), stays=args.show).run()
    except CommextError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if held and args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"The servers' logs are in {folder}", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
