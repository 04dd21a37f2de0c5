"""The live page in a real browser: a run trains, is killed and comes back while the page is open.

The browser is the Chromium of the machine. Without one the test is skipped, unless TOOLKIT_REQUIRE_CHROMIUM=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.dist.test_local_runs import ROOT, TOOLKIT, ranks, reached, start, the_run
from tests.plugins.report.test_report import made
from tests.waiting import PATIENCE, wait_for
from toolkit.base import fsio

pytestmark = pytest.mark.dist

#: Until the page shows what is in the files: it is updated every two seconds.
SEEN_MS = PATIENCE * 20_000
expect.set_options(timeout=SEEN_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("TOOLKIT_REQUIRE_CHROMIUM") == "1":
            pytest.fail("TOOLKIT_REQUIRE_CHROMIUM=1, and there is no chromium on PATH")
        pytest.skip("there is no chromium on PATH: on Debian `apt-get install chromium`")
    # Chromium has no sandbox for root, and none in most containers. It opens the page of this test alone.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextlib.contextmanager
def serving(env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `toolkit serve`, and yield the process and the address that a user opens."""
    with subprocess.Popen([*TOOLKIT, "serve"], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().removeprefix("open ").strip()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=PATIENCE * 10)
            finally:
                process.kill()  # else leaving the block would wait for it for ever


@pytest.fixture
def address(env: dict[str, str]) -> Iterator[str]:
    with serving(env) as (_, address):
        yield address


def curve(page: Page, tag: str) -> Any:
    """Return the data of the first run's curve that the page has now."""
    return json.loads(page.locator("#points").text_content())["tags"][tag][0]


def test_a_run_that_is_killed_and_comes_back_is_seen_so(env: dict[str, str], browser: Browser, address: str) -> None:
    page, wrong, asked = browser.new_page(), list[str](), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    with start(env, "train.epochs=2000", "checkpoint.every_steps=20", "train.log_every=1") as process:
        try:
            run = the_run(env)
            reached(run, 30)
            page.goto(address)
            assert "token" not in page.url
            page.get_by_role("link", name="digits-ddp").click()
            expect(page.locator("h1")).to_have_text(f"digits-ddp/{run.id}")
            loss = page.locator('figure[data-tag="train/loss"]')
            expect(loss.locator("path.line")).to_have_attribute("d", re.compile("^M.*L"))
            expect(page.locator("pre").first).to_contain_text("step")

            # It is killed while the page is open, and comes back.
            os.kill(ranks(env)[1], signal.SIGKILL)
            attempts = page.locator("section", has=page.locator("#attempts"))
            expect(attempts).to_contain_text("crashed")
            expect(page.locator(".restart").first).to_be_attached()
            again = run.status().progress.step_start
            wait_for(lambda: run.status().attempt == 2, 60, "the second attempt")
            before = curve(page, "train/loss")["strokes"][-1]
            page.wait_for_function(
                "count => JSON.parse(document.getElementById('points').textContent).tags['train/loss'][0]"
                ".strokes.flat().length > count",
                arg=len(before),
                timeout=SEEN_MS,
            )
            assert len(curve(page, "train/loss")["strokes"]) == 1, f"no gap where it went on, at step {again}"

            # Curves: a hover says what a step has, a drag zooms in, and the scale and the smoothing change.
            chart = loss.locator("svg").first
            chart.scroll_into_view_if_needed()
            box = chart.bounding_box()
            middle = box["y"] + box["height"] / 2
            page.mouse.move(box["x"] + box["width"] / 2, middle)
            expect(loss.locator("output")).to_have_text(re.compile(r"step \d+: [\d.e-]+"))
            first = loss.locator("text.x").first
            expect(first).to_have_text("0")
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
            page.mouse.up()
            expect(first).not_to_have_text("0")
            page.get_by_role("button", name="whole range").click()
            expect(first).to_have_text("0")
            page.get_by_label("smoothing").fill("0.9")
            expect(loss.locator("path.faint")).to_be_attached()
            page.get_by_label("log scale").check()
            expect(loss.locator("path.line").first).to_be_attached()

            # Its logs are chosen and followed; a folded part stays open over updates.
            page.locator("select.log").select_option("supervisor")
            expect(page.locator("pre").first).to_contain_text("SIGKILL")
            page.get_by_text(re.compile(r"\d+ keys")).click()
            subprocess.run([*TOOLKIT, "stop", run.id], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
            expect(page.locator(".state").first).to_have_text("stopped")
            expect(page.get_by_text("optim.lr", exact=True)).to_be_visible()
        finally:
            process.send_signal(signal.SIGINT)  # as Ctrl-C: the run ends with what has started it
            process.communicate(timeout=PATIENCE * 60)
    assert wrong == []
    assert {url.split("/")[2] for url in asked} == {address.split("/")[2]}, "nothing is loaded from elsewhere"
    page.close()


def test_a_page_that_is_open_before_a_run_starts_offers_its_logs(
    env: dict[str, str], browser: Browser, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", env["TOOLKIT_RUNS"])
    run, page = made(), browser.new_page()
    page.goto(address)
    page.goto(f"{page.url}runs?run=digits/{run.id}")
    expect(page.locator("select.log option")).to_have_text(["supervisor"])
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 0).write_text("step 1\n")
    expect(page.locator("select.log option")).to_have_text(["rank 0", "supervisor"])
    page.locator("select.log").select_option("0")
    expect(page.locator("pre").first).to_contain_text("step 1")
    shutil.rmtree(run.path)
    expect(page.locator("#lost")).to_contain_text("there is no such run")
    page.close()


def test_a_page_whose_server_has_ended_says_so(env: dict[str, str], browser: Browser) -> None:
    page = browser.new_page()
    with serving(env) as (process, address):
        page.goto(address)
        expect(page.get_by_text("There are none, or none that match.")).to_be_visible()
        process.send_signal(signal.SIGINT)
        expect(page.locator("#lost")).to_be_visible()
    page.close()


def test_the_site_of_the_docs_is_searched_without_a_server_and_cuts_no_code(browser: Browser) -> None:
    """CI builds the site before the tests. What is typed leads to the page that answers it, among the first four."""
    site = ROOT / "build/site/index.html"
    if not site.exists():
        pytest.skip("there is no site: make docs")
    page = browser.new_page()
    page.goto(site.as_uri())
    assert page.locator("article img").count() == 1, "the picture of the README's pitch"
    for typed, answer in {
        "--mem": "From Slurm to the toolkit",
        "preempt": "One run, one job",
        "wandb": "Reports and trackers",
        "requeue": "Requeue is not allowed",
        "CUDA out of memory": "All causes",
    }.items():
        page.locator("input.md-search__input").click()
        page.keyboard.type(typed)
        found = page.locator(".md-search-result__item:nth-child(-n+4)")
        expect(found.filter(has_text=answer).first).to_be_visible()
        page.reload()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(site.with_name("coming-from.html").as_uri())
    widths = page.eval_on_selector_all("pre > code", "all => all.map(one => one.scrollWidth - one.clientWidth)")
    assert max(widths) <= 0, "code that is cut"
    page.close()
