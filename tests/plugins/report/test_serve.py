"""`toolkit serve`: what the live page shows, and that it is the user's alone. The rules of security are attacked."""

from __future__ import annotations

import contextlib
import errno
import http.client
import http.cookiejar
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from tests.command import Command
from tests.plugins.report.test_report import EVIL, Page, log, made
from tests.process_limits import ChangeLimits
from tests.unit.attempts import attempt
from tests.waiting import wait_for
from toolkit.base import fsio
from toolkit.base.errors import EXIT_FAILED
from toolkit.cli.watch_view import SlurmBackoff
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.report import live, page, server
from toolkit.plugins.report.live import LiveRuns
from toolkit.plugins.report.server import PageServer

ROOT = Path(__file__).parents[3]


class Site:
    """A server in a thread, as a browser of the user and as others reach it."""

    def __init__(self) -> None:
        self.runs = LiveRuns(Namespace(run=[], name=None, since=None, state=None), QUEUE)
        self.server = PageServer(self.runs)
        self.port = self.server.port
        self.token = self.server.url.partition("token=")[2]
        self.cookie, self.folder = f"toolkit-serve={self.token}", ""

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Any:
        """Return the answer, with its ``text``. A header of the user's browser is replaced by one of ``headers``."""
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest(method, self.folder + path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer: Any = connection.getresponse()
            answer.text = answer.read().decode()
            return answer

    def page(self, path: str) -> Page:
        answer = self.ask(path)
        assert answer.status == 200, answer.text
        return Page(answer.text)


#: Knows no job.
QUEUE: Any = SimpleNamespace(show_jobs=lambda *_: {})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    return tmp_path


@pytest.fixture
def site() -> Iterator[Site]:
    made_site = Site()
    thread = Thread(target=made_site.server.run)
    thread.start()
    wait_for(lambda: made_site.server.server.started, 10, "the server")
    made_site.folder = made_site.ask(f"/?token={made_site.token}").getheader("location").rstrip("/")
    yield made_site
    made_site.server.server.should_exit = True
    thread.join()


@pytest.fixture
def run() -> RunDir:
    found = made()
    log(found, {step: {"train/loss": 2 / step} for step in range(1, 40)})
    found.add_attempt(attempt(1, "crashed", "restart", step_end=20))
    fsio.make_dir(found.attempt_logs(2))
    found.rank_log(2, 0).write_text("step 1\nstep 2\n 50%|####      |\r100%|########|")
    now = {"attempt": 2, "started": time.time() - 5, "updated": time.time(), "nodes": ["node7"]}
    progress = {"step": 39, "total_steps": 100, "loss": 0.05, "samples_per_s": 500.0, "eta_s": 61.0}
    found.write_status(RunStatus.from_json({"state": "running", "progress": progress, **now}))
    return found


# ------------------------------------------------------------------------------------------------------------- attacks


PATHS = ["/", "/runs?run=x", "/log?run=x", "/page.js", "/page.css", "/nosuch"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cookie", ["", "toolkit-serve=", "toolkit-serve=wrong", "other={token}"])
def test_without_the_token_nothing_is_answered(site: Site, run: RunDir, path: str, cookie: str) -> None:
    answer = site.ask(path, Cookie=cookie.format(token=site.token))
    assert answer.status == 403
    assert run.id not in answer.text


def test_the_token_in_the_address_becomes_a_cookie_that_no_script_sees(site: Site) -> None:
    answer = site.ask(f"/?token={site.token}", Cookie="")
    assert (answer.status, answer.getheader("location")) == (303, f"{site.folder}/")
    cookie = answer.getheader("set-cookie")
    assert cookie.startswith(f"{site.cookie};")
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert site.ask("/").status == 200
    for wrong in ("x", "", site.token[:-1], f"{site.token}x", site.token.lower(), "%ff%00"):
        assert site.ask(f"/?token={wrong}").status == 403, "a wrong one counts more than the cookie"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "localhost:{port}",
        "[::1]:{port}",
        "localhost.evil.example:{port}",
        "",
        "127.0.0.1.evil.example",
    ],
)
def test_a_name_that_an_attacker_points_here_is_refused(site: Site, host: str) -> None:
    """The attack is DNS rebinding: a page of evil.example asks evil.example, whose address has become 127.0.0.1."""
    assert site.ask("/", Host=host.format(port=site.port)).status in (400, 421)
    assert site.ask(f"/?token={site.token}", Host=host.format(port=site.port)).status in (400, 421)


def test_the_cookie_goes_to_a_folder_that_no_server_at_another_port_can_name(site: Site, run: RunDir) -> None:
    """A browser sends a cookie of 127.0.0.1 to every port there, and another user may listen at one."""
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar), urllib.request.ProxyHandler({}))
    assert run.id in opener.open(site.server.url).read().decode()
    [cookie] = jar
    assert cookie.path == f"{site.folder}/"
    assert len(cookie.path) > 20
    for path in ("/", "/runs", "/page.js"):
        request = urllib.request.Request(f"http://127.0.0.1:{site.port + 1}{path}")
        jar.add_cookie_header(request)
        assert not request.has_header("Cookie")
    site.folder = ""
    assert {site.ask(path).status for path in PATHS} == {404}, "what the token is for is in the folder alone"


def test_a_tunnel_may_have_another_port(site: Site) -> None:
    assert site.ask("/", Host="127.0.0.1:9000", Origin="http://127.0.0.1:9000").status == 200
    assert site.ask("/", Host="127.0.0.1:9000").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{port}"])
def test_a_request_of_another_page_is_refused(site: Site, origin: str) -> None:
    assert site.ask("/", Origin=origin.format(port=site.port)).status == 403


@pytest.mark.parametrize("site_of", ["cross-site", "same-site"])
def test_a_request_that_another_page_has_caused_is_refused(site: Site, site_of: str) -> None:
    assert site.ask("/log?run=x", Sec_Fetch_Site=site_of).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_changed(site: Site, run: RunDir, method: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    assert site.ask("/", method).status == 405
    for path in ("/", f"/runs?run={run.name}/{run.id}", f"/log?run={run.name}/{run.id}"):
        assert site.ask(path).status == 200
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


@pytest.mark.parametrize(
    "title",
    ["../../etc/passwd", "digits/..", "digits/../{id}", "/{path}", "{path}", "digits%2f..%2f{id}", "", "%00", "."],
)
def test_no_path_from_outside_is_opened(site: Site, run: RunDir, title: str, folder: Path) -> None:
    title = title.format(id=run.id, path=run.path)
    for path in (f"/runs?run={title}", f"/log?run={title}"):
        answer = site.ask(path)
        assert (answer.status, answer.text[:48]) == (404, "there is no such run below this folder for runs,")
    for path in ("/../../etc/passwd", "/%2e%2e/page.py", "/page.css/../page.html", "//page.css", "/table.html"):
        assert site.ask(path).status == 404


@pytest.mark.parametrize("name", ["../../../config.yaml", "0/../0", "-1/", "1e3", "", "\u0663", "rank-0", "9" * 30])
def test_the_name_of_a_log_is_a_number(site: Site, run: RunDir, name: str) -> None:
    answer = site.ask(f"/log?run=digits/{run.id}&log={quote(name)}")
    assert (answer.status, answer.text) == (404, "the address has something else where a number belongs")


def test_names_that_look_like_markup_are_shown_as_text(site: Site) -> None:
    evil = EVIL.replace("/", "").replace("\x01", "")
    run = made(evil, params={"text": evil})
    log(run, {1: {EVIL: 1.0}})
    run.add_attempt(attempt(1, EVIL, EVIL, line=EVIL))
    run.write_status(RunStatus.from_json({"state": "running", "updated": time.time(), "degraded_nodes": {"n": EVIL}}))
    table = site.page("/?name=" + "%3Cscript%3Ealert(1)%3C/script%3E")
    assert [each.get("src") for each in table.named("script")] == ["page.js"]
    [link] = {each["href"] for each in site.page("/").named("a") if each["href"].startswith("runs")}
    page = site.page(f"/{link}")
    assert len(page.named("script")) == 2, "the page's own, and the data"
    assert not page.named("img")
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_each_answer_forbids_what_the_page_does_not_need(site: Site, run: RunDir) -> None:
    for path in (*PATHS, f"/runs?run=digits/{run.id}", "/?token=x"):
        answer = site.ask(path)
        policy = answer.getheader("content-security-policy")
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert answer.getheader("referrer-policy") == "no-referrer"
        assert answer.getheader("x-content-type-options") == "nosniff"
        assert answer.getheader("cache-control") == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    page = site.page(f"/runs?run=digits/{run.id}")
    assert not any("style" in attributes for _, attributes in page.elements)
    assert not page.named("style")


def test_large_requests_are_refused(site: Site, run: RunDir) -> None:
    assert site.ask("/?name=" + "x" * server.MOST_URL_BYTES).status == 414
    assert site.ask("/", X="y" * server.MOST_HEAD_BYTES).status == 431
    assert site.ask("/", body=b"x", Content_Length="1").status == 413
    many = "&".join(f"run=digits/{number}" for number in range(live.MOST_RUNS + 1))
    assert site.ask(f"/runs?{many}").status == 404
    for number in ("x", "1" * 40, "-", "1.5", "%D9%A3x"):
        assert site.ask(f"/?page={number}").status == 404
    assert site.ask("/?page=999999999").status == 200
    assert (site.ask("/", "HEAD").status, site.ask("/", "HEAD").text) == (200, "")
    assert site.ask("/?sort=nosuch&sweep=nosuch&name=***[[[").status == 200


def test_connections_are_few_and_end_by_themselves(site: Site, change_limits: ChangeLimits) -> None:
    change_limits(page_request_s=0.5)
    silent = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(server.MOST_CONNECTIONS + 5)]
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        site.ask("/")
    for each in silent:
        each.settimeout(30)
        with each, contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b"", "closed by the server"
    assert site.ask("/").status == 200


def test_it_listens_to_this_machine_only_and_another_user_gets_nothing(folder: Path, run: RunDir) -> None:
    argv = [sys.executable, "-m", "toolkit", "serve"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            [port, token] = re.findall(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line)[0]
            tunnel = process.stdout.readline()
            assert f"ssh -N -L {port}:127.0.0.1:{port} " in tunnel
            with pytest.raises(ConnectionRefusedError):  # on no other address, of which this is the nearest
                socket.create_connection(("127.0.0.2", int(port)))
            # What other users see of a process.
            for file in ("cmdline", "environ"):
                assert token.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()
            code = f"""
import os, socket
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in {PATHS!r}:
    connection = socket.socket()
    connection.connect(("127.0.0.1", {port}))
    head = f"GET {{path}} HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nCookie: toolkit-serve=guess\\r\\n\\r\\n"
    connection.sendall(head.encode())
    print(connection.recv(1000).split()[1].decode())
"""
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
            assert set(done.stdout.split()) == {"403"}
        finally:
            process.send_signal(2)
            process.wait(30)


# ------------------------------------------------------------------------------------------------------- what it shows


def test_the_table_has_state_step_loss_pace_time_left_and_nodes(site: Site, run: RunDir) -> None:
    page = site.page("/")
    row = page.texts[page.texts.index(run.id) :]
    assert row[1:8] == ["running", "39/", "100", "0.0500", "500/s", "1:01", "1"]


def test_a_run_page_has_curves_attempts_why_logs_checkpoints_and_config(site: Site, run: RunDir) -> None:
    page = site.page(f"/runs?run=digits/{run.id}")
    assert "39 points, last 0.05128, min 0.05128 at step 39, max 2 at step 1" in page.texts
    [why] = [text for text in page.texts if text.startswith(f"digits/{run.id}: running")]
    assert "ATTEMPT" in why
    assert {"crashed", "optim.lr", "There are no checkpoints of the toolkit's."} <= set(page.texts)
    assert [each["value"] for each in page.named("option")] == ["0", "supervisor"]


def test_of_very_many_metrics_those_that_are_asked_for_are_drawn(site: Site, run: RunDir) -> None:
    log(run, {step: {f"layer{number}/norm": 1.0 for number in range(page.MOST_CHARTS + 50)} for step in (40, 41)})
    path = f"/runs?run=digits/{run.id}"
    assert len(site.page(path).named("figure")) == page.MOST_CHARTS
    chosen = site.page(f"{path}&metric=layer19*")
    drawn = [each["data-tag"] for each in chosen.named("figure")]
    assert drawn == ["layer19/norm"] + [f"layer19{number}/norm" for number in range(10)]
    assert f"{page.MOST_CHARTS + 39} more metrics are not drawn: layer0/norm" in chosen.text
    assert [each["value"] for each in chosen.named("input") if each.get("type") == "hidden"] == [f"digits/{run.id}"]


def test_a_page_of_a_running_run_changes_with_it(site: Site, run: RunDir) -> None:
    path = f"/runs?run=digits/{run.id}"
    assert "39 points" in site.ask(path).text
    log(run, {40: {"train/loss": 0.001}})
    assert "40 points" not in site.ask(path).text, "the sink has dropped all lines before"
    run.write_result(RunResult.from_json({"state": "completed", "step": 100}))
    assert "completed" in site.page(path).texts
    assert "completed" in site.page("/").texts
    run.clear_result()
    assert "completed" not in site.page(path).texts, "it was resumed"


def test_a_log_is_followed_from_its_end_on_and_a_bar_is_drawn(site: Site, run: RunDir) -> None:
    def piece(**query: int) -> Any:
        asked = "".join(f"&{name}={value}" for name, value in query.items())
        return json.loads(site.ask(f"/log?run=digits/{run.id}{asked}").text)

    first = piece()
    assert (first["text"], first["drawn"], first["isNew"]) == ("step 1\nstep 2\n", "100%|########|", True)
    with run.rank_log(2, 0).open("a") as file:
        file.write("\n\x1b[31mred\x1b[0m <b>\x1b[2J\nend")
    second = piece(at=first["at"], attempt=first["attempt"])
    assert (second["text"], second["drawn"], second["isNew"]) == ("100%|########|\nred <b>\\x1b[2J\n", "end", False)
    fsio.make_dir(run.attempt_logs(3))
    run.rank_log(3, 0).write_text("".join(f"line {number}\n" for number in range(50_000)))
    third = piece(at=second["at"], attempt=second["attempt"])
    assert third["isNew"]
    assert third["text"].splitlines()[0] == f"line {50_000 - live.LOG_LINES}"
    assert piece(at=10**9, attempt=3)["text"] == ""


def test_a_log_without_line_breaks_is_sent_in_pieces(site: Site, run: RunDir) -> None:
    run.rank_log(2, 0).write_bytes(b"\xff" * (3 * live.LOG_BYTES))
    found = json.loads(site.ask(f"/log?run=digits/{run.id}&at=0&attempt=2").text)
    assert (found["at"], found["isMore"], found["drawn"]) == (live.LOG_BYTES, True, "")


def test_a_very_long_line_of_a_log_is_not_sent_whole(site: Site, run: RunDir) -> None:
    with run.rank_log(2, 0).open("wb") as file:
        file.truncate(200 << 20)
    for at in (-1, 0):
        found = json.loads(site.ask(f"/log?run=digits/{run.id}&at={at}&attempt=2").text)
        assert found["isNew"]
        assert found["at"] >= (200 << 20) - live.MOST_LOG_BYTES
        assert ("left out" in found["text"]) == (at == 0)


def test_a_log_that_is_removed_while_it_is_looked_at_has_no_lines(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)  # the answer is old at once
    assert live.log_piece(run, "5", 1, -1)["text"] == ""


def test_a_run_is_there_once_it_is_submitted_until_it_is_removed(site: Site, run: RunDir) -> None:
    assert site.ask(f"/runs?run=digits/{run.id}").status == 200
    new = made()
    wait_for(lambda: site.ask(f"/runs?run=digits/{new.id}").status == 200, 5, "the new run's page")
    shutil.rmtree(new.path)
    wait_for(lambda: site.ask(f"/runs?run=digits/{new.id}").status == 404, 5, "the page to know that it is gone")
    assert site.ask(f"/log?run=digits/{new.id}").status == 404


def test_a_run_page_says_pace_time_left_and_nodes_while_it_trains(site: Site, run: RunDir) -> None:
    path = f"/runs?run=digits/{run.id}"
    texts = site.page(path).texts
    assert [texts[texts.index(name) - 1] for name in ("pace", "time left", "nodes")] == ["500/s", "1:01", "1"]
    run.write_result(RunResult.from_json({"state": "completed", "step": 100}))
    assert "time left" not in site.page(path).texts


def test_runs_that_cannot_be_read_are_named_and_hide_no_other(site: Site, run: RunDir) -> None:
    bad = made()
    (bad.path / "status.json").write_text("[]\n")
    assert "unreadable" in site.page("/").texts
    page = site.page(f"/runs?run=digits/{run.id}&run=digits/{bad.id}")
    assert any(text.startswith(f"left out: digits/{bad.id}: ") for text in page.texts)


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Have the system refuse what is asked about the entries of a folder."""

    def refusing(name: str, asked_of: str) -> None:
        real: Any = getattr(os, name)

        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            if f"{path}/{asked_of}".startswith(f"{folder}/"):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(os, name, call)

    refusing("stat", "")
    refusing("scandir", "entry")
    monkeypatch.setattr(os, "access", lambda path, *_: not str(path).startswith(f"{folder}/") and Path(path).exists())


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_run_that_cannot_be_looked_at_is_not_called_unknown(
    site: Site, run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, run.path, number)
        assert "unreadable" in site.page("/").texts
        page = site.page(f"/runs?run=digits/{run.id}")
    assert [os.strerror(number) in text for text in page.texts if text.startswith("left out: digits/")] == [True]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_folder_for_runs_that_cannot_be_looked_at_is_not_called_empty(
    site: Site, run: RunDir, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, rundir.runs_root(), number)
        answers = [site.ask("/"), site.ask(f"/runs?run=digits/{run.id}")]
        assert [answer.status for answer in answers] == [503, 503]
        assert all(os.strerror(number) in answer.text for answer in answers)
        refused = command.ends(EXIT_FAILED, "status", "--name", "digits")
    assert os.strerror(number) in refused.err


def test_the_table_is_filtered_sorted_and_in_pages(site: Site, run: RunDir) -> None:
    for number in range(live.PAGE_ROWS + 5):
        other = made(f"gpt-{number:03d}")
        other.write_result(RunResult.from_json({"state": "completed", "step": number}))
    page = site.page("/")
    assert f"{live.PAGE_ROWS + 6} runs and sweeps in {rundir.runs_root()}, page 1 of 2" in page.texts
    assert sorted(run.id in site.page(f"/?page={number}").texts for number in (1, 2)) == [False, True]
    assert run.id in site.page("/?unfinished=1").texts
    assert "There are none, or none that match." in site.page("/?name=gpt-*&unfinished=1").texts
    steps = [text for text in site.page("/?name=gpt-00&sort=-step").texts if text.endswith("/")]
    assert steps == [f"{number}/" for number in range(9, -1, -1)]


def test_runs_of_the_command_line_alone_are_served(command: Command, run: RunDir) -> None:
    other = made("gpt")
    runs = LiveRuns(Namespace(run=[], name="g*", since=None, state=None), QUEUE)
    assert runs.find(f"gpt/{other.id}") is not None
    assert runs.find(f"digits/{run.id}") is None
    assert "no run 'nosuch'" in command.refuses("serve", "nosuch")
    assert "--port 70000" in command.refuses("serve", "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "leave it out for a free one" in command.refuses("serve", "--port", str(taken.getsockname()[1]))


def test_a_sweep_is_a_row_that_unfolds_to_its_points_the_best_first(site: Site) -> None:
    points, stamp = [], rundir.id_time(time.time())
    for number, accuracy in enumerate((0.5, 0.9, None, 0.7)):
        run = RunDir(made("lr").path.rename(rundir.runs_root() / f"lr/{stamp}-{number:08x}"))
        values = {"optim.lr": number / 10}
        fsio.write_json(run.path / "point.json", {"sweep": "rates", "id": f"p{number}", "values": values})
        if accuracy is not None:
            result = {"state": "completed", "step": 9, "metrics": {"eval/accuracy": accuracy}}
            run.write_result(RunResult.from_json(result))
        points.append({"id": f"p{number}", "run": f"lr/{run.id}", "values": values})
    folder = rundir.runs_root() / ".sweeps/rates"
    fsio.make_dir(folder / "arrays")
    record = {"config": "a.yaml", "created": time.time(), "stamp": stamp, "metric": "eval/accuracy"}
    fsio.write_json(folder / "sweep.json", record)
    array = {"points": points, "token": "t", "executor": "local", "is_array": False, "job_id": None}
    fsio.write_json(folder / "arrays/0001-t.json", array)
    folded = site.page("/?unfinished=1").texts
    assert "▸ rates" in folded
    assert "3 of 4 done" in folded
    assert any("; best eval/accuracy: 0.9000; " in text for text in folded)
    assert "0.9000" not in folded
    unfolded = site.page("/?sweep=rates").texts
    assert [text for text in unfolded if re.fullmatch(r"0\.\d{4}", text)] == ["0.9000", "0.7000", "0.5000"]
    rates = [text for text in unfolded if re.fullmatch(r"0\.\d|0", text)]
    assert rates[-4:] == ["0.1", "0.3", "0", "0.2"], "a point without a value comes last"
    RunDir(rundir.runs_root() / str(points[2]["run"])).write_result(RunResult.from_json({"state": "failed"}))
    assert "▸ rates" not in site.page("/?unfinished=1").texts
    assert "▸ rates" in site.page("/").texts


def test_pages_that_ask_slurm_about_different_jobs_share_one_question() -> None:
    asked, now = list[list[str]](), [0.0]
    queue: Any = SimpleNamespace(show_jobs=lambda jobs, _: asked.append(sorted(jobs)) or dict.fromkeys(jobs))
    ask = SlurmBackoff(queue, lambda: now[0])
    for second in range(119):
        now[0] = float(second)
        ask(["1", "2"])
        assert ask(["3"]) == ({"3": None} if second >= 30 else {})
    assert asked == [["1", "2"], ["1", "2", "3"], ["1", "2", "3"]]
