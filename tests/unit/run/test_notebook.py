"""A run in a notebook: its display, and `await run`."""

import asyncio
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from toolkit.base.errors import JobFailedError
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunResult, RunState, RunStatus
from toolkit.run.submission.handle import Run


@pytest.fixture
def run(tmp_path: Path, change_limits: ChangeLimits) -> Run:
    change_limits(read_files_every_s=0.01)
    return Run(rundir.create("digits", tmp_path), "slurm", "7")


class Cells(HTMLParser):
    """The texts and tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_a_notebook_shows_state_progress_and_figures(run: Run) -> None:
    progress = RunProgress(step=30, total_steps=100, eta_s=61.0, metrics={"eval/accuracy": 0.5, "x<b>": None})
    run.dir.write_status(RunStatus(RunState.RUNNING, attempt=1, progress=progress))
    page = Cells(run._repr_html_())
    assert page.texts[:4] == ["run", f"digits/{run.id}", "state", "running"]
    assert {"30 of 100", "1:01", "0.5", "x<b>", "not a number"} <= set(page.texts)
    assert set(page.tags) == {"progress", "table", "tr", "th", "td"}


def test_an_awaited_run_returns_its_result_and_lets_others_go_on(run: Run) -> None:
    run.dir.write_status(RunStatus(RunState.RUNNING))

    async def end() -> None:
        await asyncio.sleep(0.05)
        run.dir.write_result(RunResult(RunState.COMPLETED, step=9))

    async def both() -> dict[str, object]:
        ending = asyncio.create_task(end())
        result = await run
        await ending
        return result

    assert asyncio.run(both())["step"] == 9


def test_an_awaited_run_that_is_gone_raises(
    run: Run, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    monkeypatch.setattr(Run, "is_over", lambda self, show_jobs=None: True)
    change_limits(ask_slurm_every_s=0.0, files_lag_s=0.0)

    async def wait() -> None:
        await run

    with pytest.raises(JobFailedError, match="wrote no result"):
        asyncio.run(wait())


def test_an_await_that_is_cancelled_ends_at_once(run: Run) -> None:
    async def wait() -> None:
        await asyncio.wait_for(run, 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
