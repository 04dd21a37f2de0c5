"""`toolkit report` in a headless Chromium: it loads nothing, fits, and has both colour schemes."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest

from tests.unit.cli.test_report import EVIL, folder, log, made, report, run
from tests.unit.cli.test_why import attempt
from toolkit.cli import main as cli
from toolkit.cli.report import browser
from toolkit.cli.report.browser import Tab
from toolkit.errors import EXIT_DONE, RequestError
from toolkit.rundir import RunDir

pytestmark = pytest.mark.soak
__all__ = ["folder", "run"]  # fixtures

#: The colour of the page behind everything.
PAPER = {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}


@pytest.fixture(scope="module")
def program() -> str:
    """The browser; with TOOLKIT_REQUIRE_BROWSER=1 it must be there."""
    try:
        return browser.find()
    except RequestError as error:
        if os.environ.get("TOOLKIT_REQUIRE_BROWSER"):
            raise
        pytest.skip(str(error))


def complaints(tab: Tab) -> list[str]:
    """What the browser has reported that a page should not cause."""
    unwanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
    requests = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
    return [str(e) for e in tab.events if e["method"] in unwanted] + [url for url in requests if url[:8] != "file:///"]


def test_the_page_fits_both_widths_and_both_colour_schemes(run: RunDir, program: str, tmp_path: Path) -> None:
    # Names and texts without a place for a line break would widen a page that does not wrap them.
    other = made("a-name-of-a-run-that-is-long-and-has-no-place-to-break-it-anywhere-at-all")
    log(other, {step: {"train/loss": 3.0, EVIL: 1.0} for step in (10, 20)})
    hosts = "a-node-with-a-long-name-[001-080]"
    other.add_attempt(attempt(1, "crashed", "restart", nodes=hosts, line=EVIL + "x" * 400, goodput={"training": 1.0}))
    page = tmp_path / "out.html"
    assert cli.main(["report", run.id, other.id, "--to", str(page)]) == EXIT_DONE
    with browser.opened(program) as tab:
        for scheme, paper in PAPER.items():
            for width in (1280, 400):
                tab.show(page, width, scheme)
                tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
                assert tab.value("document.documentElement.scrollWidth") <= width
                assert tab.value("getComputedStyle(document.body).backgroundColor") == paper
                assert tab.value("document.querySelectorAll('svg.chart path').length") > 3
                assert tab.value("document.scripts.length") == 0
                assert complaints(tab) == []


def test_the_complaints_of_a_page_that_loads_and_runs_something_are_seen(program: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<p style='width: 3000px'>wide<img src='http://127.0.0.1:9/x.png'><script>console.log(1); x()</script>"
    )
    with browser.opened(program) as tab:
        tab.show(bad, 400, "light")
        assert tab.value("document.documentElement.scrollWidth") > 400
        assert len(complaints(tab)) >= 3


def test_a_picture_of_the_whole_page_is_written_beside_it(run: RunDir, program: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert cli.main(["report", run.id, "--to", str(page), "--png"]) == EXIT_DONE
    picture = page.with_suffix(".png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])  # PNG (ISO 15948), the IHDR chunk
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert width == 1920
    assert height > 1000


def test_a_million_points_are_reported_below_one_megabyte() -> None:
    run = made()
    with (run.tensorboard / "metrics.jsonl").open("w") as file:
        for step in range(1_000_000):
            file.write(f'{{"step": {step}, "wall_time": 1.8e9, "train/loss": {math.sin(step)}, "train/lr": 0.1}}\n')
    page = report(run.id)
    assert Path("out.html").stat().st_size < 1_000_000
    assert f"1000000 points, last {math.sin(999_999):.4g}, min -1 at step" in page.text
