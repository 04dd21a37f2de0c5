"""`toolkit report`: one HTML file, whatever is in the run folder."""

import base64
import errno
import hashlib
import html.parser
import json
import math
import random
import re
import stat
import statistics
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command import Command
from tests.unit.attempts import attempt
from tests.unit.checkpoint.ranks import alone, weights
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.cli import main as cli
from toolkit.config import JobConfig
from toolkit.config.schema import NotifyConfig
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics.goodput import MEASURED, PARTS, TimeBreakdown
from toolkit.metrics.sinks import JsonlSink
from toolkit.plugins.report.curves import PIECES, Curve, CurvePiece, CurveReader, is_system_metric
from toolkit.plugins.report.page import _readable
from toolkit.plugins.report.stragglers import History
from toolkit.run.job import nodes

#: Elements that have no end.
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x01\u202e"


class Page(html.parser.HTMLParser):
    """A page as a browser reads it: elements, their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(name: str = "digits", **config: Any) -> RunDir:
    run = rundir.create(name)
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(name="digits", **config)))
    return run


def log(run: RunDir, values: dict[int, dict[str, float]]) -> None:
    sink = JsonlSink(run.tensorboard / "metrics.jsonl", None, clock=lambda: 1.8e9)
    for step, found in values.items():
        sink.scalars(step, found)
    sink.close()


def report(*argv: str) -> Page:
    assert cli.main(["report", *argv, "--to", "out.html"]) == EXIT_DONE
    return Page(Path("out.html").read_text())


@pytest.fixture
def run() -> RunDir:
    """Return a run that lost a node, came back on a spare, and was completed."""
    run = made()
    log(run, {step: {"train/loss": 2 / step, "eval/accuracy": step / 100} for step in range(10, 100, 10)})
    spent = {"queue": 5.0, "start_up": 10.0, "training": 40.0, "idle": 5.0}
    lost = {"lost_nodes": ["node2"], "first_failure": {"rank": 3, "host": "node2", "how": "no sign of life"}}
    run.add_attempt(attempt(1, "node_failure", "restart", step_end=50, **lost, goodput=spent))
    later = {"started": "2026-11-20T15:01:00.000+00:00", "ended": "2026-11-20T15:03:00.000+00:00"}
    run.add_attempt(
        attempt(2, "completed", "finish", nodes="node[1,3]", step_start=40, step_end=90, **later, goodput=spent)
    )
    nodes.remember(run, "node2", "its agent fell silent")
    alone(CheckpointFolder(run.checkpoints), 90, weights(1.0))
    run.write_result(RunResult.from_json({"state": "completed", "step": 90, "metrics": {"eval/accuracy": 0.9}}))
    return run


def test_a_report_shows_curves_attempts_causes_nodes_time_config_and_versions(run: RunDir) -> None:
    page = report(run.id)
    remark = "no longer used: its agent fell silent"
    assert {"node_failure", "completed", "restart", remark, "optim.lr", "torch"} <= set(page.texts)
    assert "9 points, last 0.02222, min 0.02222 at step 90, max 0.2 at step 10" in page.texts
    row = page.texts.index("node2")
    assert page.texts[row + 1] == "LF", "lost, and the first to fail"
    assert [each["aria-label"] for each in page.named("svg") if each.get("class") == "bar"][1].startswith(
        "attempt 1: node_failure, restart, 1 min from 2026-11-20 15:00:00 UTC on"
    )
    assert "step-00000090" in page.texts
    charts = points_of(page)
    assert charts["runs"] == [{"title": f"digits/{run.id}", "restarts": [40]}], "a mark of the second attempt"
    assert charts["tags"]["train/loss"][0]["strokes"][0][:4] == [10, 0.2, 10, 0.1]
    assert [each["data-tag"] for each in page.named("figure")] == ["train/loss", "eval/accuracy"]


def points_of(page: Page) -> Any:
    """Return the data of the charts."""
    [text] = [text for text in page.texts if text.startswith('{"runs":')]
    return json.loads(text)


def test_a_report_loads_nothing_runs_its_own_script_alone_and_is_private(run: RunDir) -> None:
    page = report(run.id)
    text = Path("out.html").read_text()
    assert page.named("script") == [{"type": "application/json", "id": "points"}, {}]
    assert not page.named("link")
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")], tag
        assert "style" not in attributes
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    [policy] = [each["content"] for each in page.named("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    for element in ("style", "script"):
        [own] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        allowed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{allowed}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert stat.S_IMODE(Path("out.html").stat().st_mode) == 0o600
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes} - {"points"}
    assert {each["href"][1:] for each in page.named("a")} == anchors


def test_names_that_look_like_markup_are_shown_as_text() -> None:
    run = made(EVIL.replace("/", "").replace("\x01", ""), params={"text": EVIL.replace("\x01", "")})
    log(run, {1: {EVIL: 1.0, "{{ 7 * 7 }}{% x %}": 2.0, "train/loss": 2.0}})
    run.add_attempt(attempt(1, EVIL, EVIL, line=EVIL, goodput={"training": 1.0}))
    run.write_status(RunStatus.from_json({"state": "running", "degraded_nodes": {"node1": EVIL}}))
    page = report(run.id)
    assert len(page.named("script")) == 2, "the data, and the page's own"
    assert not page.named("img")
    assert _readable(EVIL) in points_of(page)["tags"], "by the name that its figure has"
    assert any("<script>alert(1)</script><img src=x onerror=alert(2)>" in text for text in page.texts)
    assert "{{ 7 * 7 }}{% x %}" in page.texts
    assert "\x01" not in page.text
    assert "\u202e" not in page.text


def test_values_that_may_be_secret_are_not_in_a_report(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("A_TOKEN_OF_THE_ENVIRONMENT", "planted-in-the-environment")
    run = made(
        params={"api_key": "planted-1", "db": {"password": "planted-2"}},
        notify=NotifyConfig(command=["mail", "--auth", "planted-3"]),
    )
    text = run.config.read_text().replace("setup: []", "setup: ['export WANDB_API_KEY=planted-4']")
    run.config.write_text(text)
    report(run.id)
    assert "planted" not in Path("out.html").read_text()
    assert "planted" not in command("report", run.id, "--json")


def test_two_runs_share_the_charts_and_what_differs_is_in_a_table(run: RunDir) -> None:
    other = made("other")
    other.config.write_text(other.config.read_text().replace("lr: 0.05", "lr: 0.5"))
    log(other, {step: {"train/loss": 3.0} for step in (10, 20)})
    for argv in ([run.id, other.id], [run.id, "--compare", other.id]):
        page = report(*argv)
        charts = points_of(page)
        assert [each["restarts"] for each in charts["runs"]] == [[40], []], "the first run has two attempts"
        assert [curve and len(curve["strokes"][0]) for curve in charts["tags"]["train/loss"]] == [18, 4]
        assert [curve and curve["bad"] for curve in charts["tags"]["eval/accuracy"]] == [None, None]
        row = page.texts.index("config optim.lr")
        assert page.texts[row + 1 : row + 3] == ["0.05", "0.5"]
    assert sum(tag == "h1" for tag, _ in page.elements) == 1, "the other run is only compared with"


def test_points_of_a_sweep_are_told_apart_by_what_was_swept(run: RunDir) -> None:
    (run.path / "point.json").write_text(json.dumps({"sweep": "rates", "id": "a", "values": {"optim.lr": 0.05}}))
    page = report(run.id, made("other").id)
    assert {f"{run.name}/{run.id} (optim.lr=0.05)", "Time of optim.lr=0.05"} <= {text.strip() for text in page.texts}
    (run.path / "point.json").write_text("[]")
    assert f"{run.name}/{run.id}" in {text.strip() for text in report(run.id).texts}, "as a run that is not a point"


def test_what_was_asked_and_used_is_a_table_with_the_next_request(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"nodes": 2, "tasks_per_node": 2, "cpus_per_task": 4, "cpus": 16, "memory_bytes": 64 << 30, "wall_s": 600.0}
    used = {"cpu_s": 1200.0, "cpu_held_s": 9600.0, "most_cpus": 2.5, "most_bytes": 8 << 30, "most_bytes_host": "node2"}
    efficiency = {"jobs": 1, "usage": {**asked, **used}, "sbatch": "sbatch --nodes=2 --mem=10G"}
    run.write_result(RunResult.from_json({"state": "completed", "efficiency": efficiency}))
    page = report(run.id)
    row = page.texts.index("CPUs")
    assert page.texts[row + 1 : row + 4] == [
        "16 on 2 nodes",
        "2.0 on average, 2.5 at a node's peak",
        "88 % (2.3 CPU h)",
    ]
    assert "sbatch --nodes=2 --mem=10G" in page.text
    capsys.readouterr()
    assert cli.main(["report", run.id, "--json"]) == EXIT_DONE
    [told] = json.loads(capsys.readouterr().out)["runs"]
    assert told["efficiency"]["usage"]["cpus"] == 16
    assert "last_lines" not in told


def test_the_cause_of_a_failure_is_shown_without_the_lines_of_its_log(run: RunDir) -> None:
    failure = {"rank": 3, "host": "node2", "how": "exit code 1"}
    run.add_attempt(attempt(3, "crashed", "give_up", first_failure=failure))
    run.write_result(RunResult.from_json({"state": "failed", "why": "rank 3 on node2: exit code 1"}))
    log_of_rank = run.rank_log(3, 3)
    fsio.make_dir(log_of_rank.parent)
    text = "key planted-in-a-log\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. planted\n"
    log_of_rank.write_text(text)
    page = report(run.id)
    [cause] = [text for text in page.texts if text.startswith("Cause: ")]
    assert "memory" in cause
    assert any(text.startswith("Next: ") for text in page.texts)
    assert "planted" not in Path("out.html").read_text()


def test_json_is_one_document_with_the_exact_extremes(run: RunDir, command: Command) -> None:
    log(run, {1: {"train/loss": 1.0}, 2: {"train/loss": math.nan}, 3: {"train/loss": -7.5}})
    found = json.loads(command("report", run.id, "--json"))
    curve = found["runs"][0]["curves"]["train/loss"]
    assert curve == {
        "count": 3,
        "not_finite": 1,
        "first": [1, 1.0],
        "last": [3, -7.5],
        "least": [3, -7.5],
        "greatest": [1, 1.0],
    }
    assert [line["cause"] for line in found["runs"][0]["attempts"]] == ["node_failure", "completed"]
    assert not list(Path().glob("*.html"))


# -------------------------------------------------------------------------------------------------------------- curves


def values_of(curve: Curve) -> list[tuple[int, float]]:
    """Return the points that the page gets of a curve, as its script reads them."""
    points: list[tuple[int, float]] = []
    for numbers in curve.numbers():
        step = 0.0
        for distance, value in zip(numbers[::2], numbers[1::2], strict=True):
            step += distance
            points.append((int(step), value))
    return points


def test_no_peak_of_a_long_curve_is_lost_and_its_chart_is_small() -> None:
    dice, curve, count = random.Random(5), Curve(), 200_000
    values = [dice.gauss(0.0, 1.0) for _ in range(count)]
    values[123_457], values[77_777] = 40.0, -30.0
    for step, value in enumerate(values):
        curve.add(step, value)
    points = values_of(curve)
    assert len(json.dumps(curve.numbers())) < 15_000
    assert {(123_457, 40.0), (77_777, -30.0), (0, float(f"{values[0]:.5g}"))} <= set(points)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(value == float(f"{values[step]:.5g}") for step, value in points), "no value is made up"


def test_what_is_smoothed_of_a_long_curve_are_means_of_all_values() -> None:
    dice, curve, count = random.Random(6), Curve(), 100_000
    values = [dice.lognormvariate(0.0, 1.0) for _ in range(count)]  # most of them are small
    for step, value in enumerate(values):
        curve.add(step, value)
    [means] = curve.strokes(of_means=True)
    width = curve.width
    step, mean = means[3]
    assert step == 4 * width - width // 2 - 1
    assert mean == pytest.approx(statistics.fmean(values[3 * width : 4 * width]))
    assert len(curve.pieces) == len(means) <= 2 * PIECES


def test_a_value_that_is_not_finite_breaks_the_line_and_is_counted() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, 2.0, math.nan, 3.0, math.inf]):
        curve.add(step, value)
    assert curve.numbers() == [[0, 1.0, 1, 2.0], [3, 3.0]]
    assert (curve.summary()["not_finite"], curve.first_bad) == (2, 2)


def test_steps_that_are_missing_break_the_line_and_rarer_ones_do_not() -> None:
    """Lines of a dead node may be lost. After an evaluation each epoch, or with fewer lines from here on, none is."""
    curve = Curve()
    for step in [*range(10, 110, 10), *range(900, 1000, 10), *range(2000, 4000, 500)]:
        curve.add(step, 1.0)
    assert [(stroke[0][0], stroke[-1][0]) for stroke in curve.strokes()] == [(10, 100), (900, 990), (2000, 3500)]
    uneven = Curve()
    for step in (1, 50, 100, 150, 160, 300):
        uneven.add(step, 1.0)
    assert len(list(uneven.strokes())) == 1


@pytest.mark.parametrize("values", [[0.0], [-1e299, 1e299], [5e-324, 0.0], [1e16, 1e16 + 2], [math.nan]])
def test_any_range_of_values_is_json(values: list[float]) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    assert json.loads(json.dumps(curve.numbers(), allow_nan=False)) == curve.numbers()
    piece = CurvePiece((0, 1e308))
    for step in range(1, 9):
        piece.add((step, 1e308))
    assert piece.mean == pytest.approx(1e308)


def test_a_growing_file_is_read_on_from_where_it_ended(fresh: RunDir) -> None:
    path = fresh.tensorboard / "metrics.jsonl"
    reader, sink = CurveReader(path), JsonlSink(path, None)
    assert reader.read() == {}
    sink.scalars(10, {"train/loss": 1.0})
    assert reader.read()["train/loss"].last_step == 10
    sink.scalars(10, {"eval/loss": 2.0})  # added to the same line
    sink.scalars(20, {"train/loss": 0.5})
    curves = reader.read()
    assert (curves["train/loss"].count, curves["eval/loss"].count, reader.left_bytes) == (2, 1, 0)
    with path.open("a") as file:
        file.write('{"step": 30, "train/l')
    assert reader.read()["train/loss"].count == 2, "a line that is being written is not read yet"
    sink.close()


@pytest.mark.parametrize("again", [20, 300])
def test_steps_that_an_attempt_makes_again_replace_those_before_them(
    fresh: RunDir, caplog: pytest.LogCaptureFixture, again: int
) -> None:
    path = fresh.tensorboard / "metrics.jsonl"
    sink = JsonlSink(path, None)
    for step in range(1, 201):
        sink.scalars(step, {"train/loss": 1.0})
    sink.close()
    reader = CurveReader(path)
    assert reader.read()["train/loss"].last_step == 200
    sink = JsonlSink(path, 5)  # drops the steps after the checkpoint
    for step in range(6, again + 1):
        sink.scalars(step, {"train/loss": 2.0, "new": 1.0})
    sink.close()
    curve = reader.read()["train/loss"]
    assert (curve.count, curve.last_step) == (again, again)
    assert curve.summary()["greatest"] == (6, 2.0)
    assert caplog.messages == []


def test_a_long_file_is_read_in_pieces_of_time(fresh: RunDir) -> None:
    log(fresh, {step: {"train/loss": 1.0} for step in range(1, 20_001)})
    reader, pieces = CurveReader(fresh.tensorboard / "metrics.jsonl"), 0
    while pieces == 0 or reader.left_bytes:
        before = reader.left_bytes
        reader.read(0.005)
        pieces += 1
        assert pieces == 1 or reader.left_bytes < before
    assert pieces > 1
    assert reader.curves["train/loss"].count == 20_000


def test_each_reading_gets_on_however_short_it_is(fresh: RunDir) -> None:
    log(fresh, {step: {"train/loss": 1.0} for step in range(1, 11)})
    reader = CurveReader(fresh.tensorboard / "metrics.jsonl")
    for _ in range(10):
        reader.read(0.0)
    assert reader.left_bytes == 0


def test_thousands_of_metrics_and_nodes_and_attempts_stay_below_one_megabyte() -> None:
    run = made()
    log(run, {step: {f"train/metric_{tag}": math.sin(tag * step) for tag in range(1600)} for step in range(1, 6)})
    for number in range(1, 71):
        spent = {"training": 60.0}
        run.add_attempt(attempt(number, "crashed", "restart", nodes="node[0001-0200]", line="x" * 900, goodput=spent))
    page = report(run.id)
    assert Path("out.html").stat().st_size < 1_000_000
    assert re.search(r"\d+ more metrics are in the run's files", page.text)
    assert "136 more nodes" in page.texts
    assert "The last 60 of 70 attempts." in page.text


@pytest.mark.soak
def test_a_million_points_are_reported_below_one_megabyte() -> None:
    run = made()
    with (run.tensorboard / "metrics.jsonl").open("w") as file:
        for step in range(1_000_000):
            file.write(f'{{"step": {step}, "wall_time": 1.8e9, "train/loss": {math.sin(step)}, "train/lr": 0.1}}\n')
    page = report(run.id)
    assert Path("out.html").stat().st_size < 1_000_000
    assert f"1000000 points, last {math.sin(999_999):.4g}, min -1 at step" in page.text


def test_a_run_that_has_only_a_config_gets_a_report_with_what_there_is() -> None:
    page = report(made().id)
    assert {"No metrics were logged.", "No attempt has begun.", "No nodes are known."} <= set(page.texts)


def test_the_attempt_that_runs_now_is_in_the_timeline() -> None:
    run = made()
    now = {"attempt": 1, "started": 1.8e9, "updated": 1.8e9 + 60, "nodes": ["node7"], "goodput": {"training": 50.0}}
    run.write_status(RunStatus.from_json({"state": "running", "progress": {"step": 5}, "supervised": True, **now}))
    page = report(run.id)
    assert "1: running" in page.texts
    assert "node7" in page.texts


@pytest.mark.parametrize("name", ["status.json", "result.json", "attempts.jsonl", "nodes.json"])
def test_of_several_runs_one_that_cannot_be_read_is_left_out_and_named(
    run: RunDir, name: str, command: Command
) -> None:
    other = made()
    (run.path / name).write_text("[]\n")
    page = report(other.id, run.id)
    assert any(text.startswith(f"left out: {run.name}/{run.id}: ") and name in text for text in page.texts)
    assert f"{name}" in command.refuses("report", run.id)


def test_what_can_be_read_of_config_and_metrics_is_in_the_report(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("config.yaml", "tensorboard/metrics.jsonl"):
        (run.path / name).write_bytes(b"\x00\xff{[\n" * 9)
    page = report(run.id)
    assert "The config cannot be read." in page.texts
    assert "config.yaml cannot be read" in caplog.text
    assert "metrics.jsonl: the line that ends at byte 5 cannot be read" in caplog.text


def test_a_report_replaces_a_report_and_no_other_file(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    report(run.id)
    report(run.id)
    Path("train.py").write_text("print()\n")
    assert cli.main(["report", run.id, "--to", "train.py"]) == EXIT_REQUEST
    assert "train.py already exists, and this command did not write it" in capsys.readouterr().err
    assert Path("train.py").read_text() == "print()\n"
    assert cli.main(["report", run.id, "--to", "missing/out.html"]) == EXIT_REQUEST
    assert "missing is not a folder" in capsys.readouterr().err


def test_figures_of_what_a_run_uses_come_last_and_folded() -> None:
    assert is_system_metric("usage/disk_written_gib")
    assert not is_system_metric("eval/accuracy")


@pytest.fixture
def fresh() -> RunDir:
    return rundir.create("test")


def ledger(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | seconds


def line(number: int, first: int | None, last: int | None, **more: Any) -> AttemptRecord:
    times = {"started": "2026-11-20T15:00:10.000+00:00", "ended": "2026-11-20T15:02:00.000+00:00"}
    place = {
        "nodes": "node[1-2]",
        "cause": "crashed",
        "decision": "restart",
        "line": "rank 1 on node2: killed by SIGKILL",
    }
    keys = {"attempt": number, "step_start": first, "step_end": last, **times, **place, **more}
    return AttemptRecord.from_json(keys)


def history(fresh: RunDir, attempt: int, first_step: int, *, rank: int = 0, **spent: float) -> History:
    breakdown = TimeBreakdown()
    breakdown.spent |= spent
    session: Any = SimpleNamespace(attempt=attempt, is_main=rank == 0, run_dir=fresh.path)
    return History(session, first_step, breakdown)


def test_the_shares_are_of_the_time_since_the_submission_over_all_attempts(fresh: RunDir) -> None:
    """The whole is 200 s: 120 s up to the end of the first attempt.

    Then 20 s pass to the second one's first step, and 60 s after it.
    """
    before = ledger(queue=10.0, training=90.0, data_wait=6.0, idle=14.0)
    fresh.add_attempt(line(1, 0, 100, submitted="2026-11-20T15:00:00.000+00:00", goodput=before))
    at = datetime.fromisoformat("2026-11-20T15:02:20.000+00:00").timestamp()
    fresh.write_status(
        RunStatus.from_json({"attempt": 2, "updated": at, "started": at, "goodput": ledger(start_up=18.0, idle=2.0)})
    )
    seen = history(fresh, 2, 80, training=54.0, data_wait=6.0).scalars(120)  # 40 steps, 20 of them again
    assert seen.pop("run/attempt") == 2.0
    shares = ledger(queue=10.0, start_up=18.0, training=90.0 + 27.0, data_wait=6.0 + 3.0, replay=30.0, idle=16.0)
    assert seen == pytest.approx({f"goodput/{part}": seconds / 200.0 for part, seconds in shares.items()}, abs=1e-5)


def test_without_a_supervisor_the_shares_are_of_the_loops_own_time(fresh: RunDir) -> None:
    seen = history(fresh, 1, 0, training=3.0, evaluation=1.0).scalars(10)
    assert (seen["goodput/training"], seen["goodput/evaluation"], seen["run/attempt"]) == (0.75, 0.25, 1.0)
    assert sum(seen.values()) == pytest.approx(2.0)


def test_the_first_attempt_has_no_restarts_to_tell_of(fresh: RunDir) -> None:
    assert history(fresh, 1, 0).take_table() is None


def test_each_restart_is_a_row_that_says_what_it_cost(fresh: RunDir) -> None:
    fresh.add_attempt(line(1, 0, 170))
    fresh.add_attempt(line(2, None, None, line="rank 0: a|b\nnot found", nodes="node[1,3]"))
    fresh.write_status(RunStatus.from_json({"attempt": 3, "nodes": ["node1"]}))
    seen = history(fresh, 3, 100)
    assert (seen.take_table() or "").splitlines() == [
        "| attempt | from step | nodes | why the attempt before it ended | steps lost |",
        "| --- | --- | --- | --- | --- |",
        "| 2 |  | node[1,3] | crashed: rank 1 on node2: killed by SIGKILL |  |",
        r"| 3 | 100 | node1 | crashed: rank 0: a\|b not found |  |",
    ]
    assert seen.take_table() is None  # once in an attempt
    assert "| 2 | 60 | node[1-2] | crashed: rank 1 on node2: killed by SIGKILL | 110 |" in told_of(fresh)


def told_of(fresh: RunDir) -> str:
    """Return the table at the first step of the second attempt."""
    (fresh.path / "attempts.jsonl").unlink()
    fresh.add_attempt(line(1, 0, 170))
    fresh.write_status(RunStatus.from_json({"attempt": 2, "nodes": ["node1", "node2"]}))
    return history(fresh, 2, 60).take_table() or ""


def test_a_disk_that_is_away_costs_figures_and_ends_no_training(fresh: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: RunDir) -> RunStatus:
        raise OSError(errno.EIO, "Input/output error")

    told = history(fresh, 1, 0)
    monkeypatch.setattr(RunDir, "status", away)
    assert "goodput/training" in told.scalars(1)


def test_only_rank_0_reads_the_files(fresh: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.add_attempt(line(1, 0, 100, goodput=ledger(training=1.0)))
    monkeypatch.setattr(RunDir, "attempts", lambda self: 1 / 0)
    monkeypatch.setattr(RunDir, "status", lambda self: 1 / 0)
    other = history(fresh, 2, 0, rank=1, **dict.fromkeys(MEASURED, 1.0))
    assert (other.scalars(5), other.take_table()) == ({}, None)
