"""The window's page in a browser: what an operator sees of engines, requests and their reasons."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.proxy.test_window import BEARER, HOSTILE, TOKEN, stream_both, window_of

playwright = pytest.importorskip(
    "playwright.async_api", reason="no playwright: pip install playwright brings it"
)
playwright.expect.set_options(timeout=30_000)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium brings it"
)
SHOTS = os.environ.get("COMMEXT_SHOTS")
"""A folder for screenshots to look at."""


@asynccontextmanager
async def shown(kit: Any, tmp_path: Path, **page_options: Any) -> AsyncIterator[Any]:
    """Three engines, the proxy, and the window in a browser, which complains of nothing."""
    (tmp_path / "token").write_text(TOKEN)
    options = {"admin_port": 0, "admin_token_file": str(tmp_path / "token")}
    options |= {"health_interval_seconds": 0.05, "tpot_ms": 15, "ttft_ms": 1000}
    complaints: list[str] = []
    async with kit.cluster(0, 0, num_both=3, **options) as cluster, driven() as browser:
        for engine in cluster.both:
            engine.behave = lambda call: stream_both(kit, call)
            engine.cache = (1000, 0.5)
        page = await browser.new_page(**{"viewport": {"width": 800, "height": 900}, **page_options})
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        admin = await window_of(cluster)
        page.admin = admin
        await page.goto(f"{admin.url}/#{TOKEN}")
        yield cluster, page
        if SHOTS:
            name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
            await page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)
        assert not complaints


@asynccontextmanager
async def driven() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu"]}
        browser = await driver.chromium.launch(**options)
        yield browser
        await browser.close()


async def ask(cluster: Any, name: str, words: int = 20) -> None:
    body = {"prompt": "secret question " * words, "max_tokens": 20, "stream": True}
    await cluster.ask(body, headers={"X-Request-Id": name})


def state_of(page: Any, engine: str) -> Any:
    return page.locator(f"#engines tr:has(td:text-is('{engine}')) td:nth-child(2)")


async def test_engines_that_die_come_back_and_drain_are_seen(kit: Any, tmp_path: Path) -> None:
    async with shown(kit, tmp_path, viewport={"width": 1000, "height": 900}) as (cluster, page):
        expect, headers = playwright.expect, page.locator(".chart h2")
        await expect(state_of(page, "engine1")).to_have_text("ready")
        highest = "all => Math.max(...all.map(one => one.clientHeight))"
        assert 15 < await headers.evaluate_all(highest) < 25, "a header takes two lines"
        await cluster.both[1].stop()
        await expect(state_of(page, "engine1")).to_have_text("down")
        await expect(page.locator("#h-ready")).to_have_text("2 of 3")
        await expect(page.locator("#engines")).to_contain_text("/health failed")
        await cluster.both[1].start()
        await expect(state_of(page, "engine1")).to_have_text("ready")
        await expect(page.locator("#engines")).not_to_contain_text("/health failed")
        url = {"url": cluster.both[2].url}
        async with cluster.session.post(f"{page.admin.url}/drain", json=url, headers=BEARER):
            await expect(state_of(page, "engine2")).to_have_text("draining")
        await expect(page.locator("#events li")).to_have_count(6)


async def test_requests_have_their_reason_and_timeline_and_hostile_names_are_text(
    kit: Any, tmp_path: Path
) -> None:
    async with shown(kit, tmp_path, color_scheme="dark") as (cluster, page):
        expect, rows = playwright.expect, page.locator("#requests tbody tr")
        for _ in range(3):
            await ask(cluster, HOSTILE)
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_contain_text(HOSTILE)
        await expect(rows.first).to_contain_text("one engine")
        await expect(page.locator(".plot b").nth(1)).to_have_text("limit 1000 ms")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        detail = page.locator("#detail")
        await expect(detail).to_contain_text("first token")
        await expect(detail).to_contain_text("two engines: expected")
        last = (await page.admin.state(lambda state: len(state["latest"]) == 3))["latest"][0]
        num_parts = 5 if last["placement"].startswith("handed_over") else 4
        assert len(last["parts"]) == num_parts
        await expect(detail.locator("rect")).to_have_count(num_parts)
        await expect(page.locator("img")).to_have_count(0)
        assert "secret" not in await page.content()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 800
        await expect(page.locator("body")).to_have_css("background-color", "rgb(16, 20, 24)")
        await page.keyboard.press("Escape")
        await expect(detail).to_be_hidden()
        await page.keyboard.press("p")
        await ask(cluster, "while-paused")
        await asyncio.sleep(1.5)
        await expect(rows).to_have_count(3)
        await page.keyboard.press("p")
        await expect(rows).to_have_count(4)


async def test_a_wrong_token_is_asked_for_and_a_silent_proxy_is_told(
    kit: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    options = {"admin_port": 0, "admin_token_file": str(tmp_path / "token"), "num_both": 1}
    async with kit.cluster(0, 0, **options) as cluster, driven() as browser:
        expect, page = playwright.expect, await browser.new_page()
        admin = await window_of(cluster)
        await page.goto(admin.url)
        await page.fill("#token", "another")
        await page.keyboard.press("Enter")
        await expect(page.locator("#alert")).to_contain_text("does not take this token")
        await page.fill("#token", TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.locator("#main")).to_be_visible()
        await page.route("**/state", lambda route: route.abort())
        await expect(page.locator("#alert")).to_contain_text("has not answered")
