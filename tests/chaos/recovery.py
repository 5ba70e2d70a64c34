"""The way back to service: requests until one is read from the prefill engine and right."""

from __future__ import annotations

import time

import httpx

from tests.chaos.judge import RIGHT, Recovery
from tests.chaos.load import Load, ask
from tests.chaos.testbed import Testbed
from tests.kit.parity import tls

LOCAL_PREFILLS = "commext_proxy_local_prefills_total"
GIVE_UP_SECONDS = 40.0
POLL_SECONDS = 0.05


def recover(testbed: Testbed, load: Load, back: float) -> Recovery:
    """Ask through the proxy until an answer is right and was read, since the peer was ``back``.

    An answer through the proxy is either computed by the decode engine from the start, which the
    proxy counts, or after a failed load, which the decode engine counts where its policy permits
    it, or read. Where another request was counted at the same time nothing is proven, and one more
    is sent."""
    attempts = 1
    why = wait_for_proxy(testbed.proxy_url, back + GIVE_UP_SECONDS)
    while time.monotonic() < back + GIVE_UP_SECONDS:
        reference = load.references[attempts % len(load.references)]
        try:
            before = _not_read(testbed)
            bound, extra = load.bound_seconds, load.salted()
            answer = ask(testbed.proxy_url, reference.prompt, timeout_seconds=bound, extra=extra)
            verdict = load.note(reference, answer)
            ended = time.monotonic()
            proven = verdict == RIGHT and _not_read(testbed) == before
        except OSError as error:
            why = f"no page of metrics: {error}"
            time.sleep(POLL_SECONDS)
            continue
        if proven:
            return Recovery(attempts, ended - back, succeeded=True)
        why = answer.error or f"an answer that was {verdict}, not known to have been read"
        attempts += verdict != RIGHT
    return Recovery(attempts, time.monotonic() - back, succeeded=False, why=why)


def _not_read(testbed: Testbed) -> float:
    return testbed.proxy_metrics().total(LOCAL_PREFILLS) + testbed.failed_loads()


def wait_for_proxy(url: str, deadline: float) -> str:
    why = ""
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{url}/health", timeout=2.0, trust_env=False, verify=tls())
            if response.status_code == 200:
                return ""
            why = f"the proxy's health is HTTP {response.status_code}: {response.text[:200]}"
        except httpx.HTTPError as error:
            why = f"the proxy does not tell its health: {type(error).__name__}: {error}"
        time.sleep(POLL_SECONDS)
    return why
