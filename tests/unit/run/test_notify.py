"""Notices of a run: what is due, that each is sent once, and that no failure harms the run. Processes are real."""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import Ranks, completes, ended, supervise
from tests.waiting import processes_with, wait_for
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import ConfigError
from toolkit.base.logs import LOGGER
from toolkit.config import JobConfig
from toolkit.config.schema import NotifyConfig
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, OutputFigures, RunProgress, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.verdict import Verdict
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.supervise import entry, notify
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick")

#: Notes its environment and what it reads, a line of each for each call.
TELL = ["sh", "-c", 'env -0 | tr "\\0\\n" "\\n " > "$0.env"; tr -d "\\n" >> "$0.said"; echo >> "$0.said"']


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, "toolkit")
    return caplog


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run that tells its end to files beside the runs."""
    run = rundir.create("digits", tmp_path / "runs")
    told_by(run, *TELL, str(tmp_path / "note"))
    return run


def told_by(run: RunDir, *command: str) -> None:
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=NotifyConfig(command=list(command)))))


def said(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what each call of the command has read from its standard input."""
    path = tmp_path / "note.said"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_is_told_run_state_and_reason_and_reads_the_result(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"state": "failed", "why": "rank 3 on node2: exit code 1", "metrics": {"eval/accuracy": 0.9}}
    run.write_result(RunResult.from_json(result))
    job = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask", "RANK": "0", "PYTHONPATH": f"{run.code}:/lib/mine"}
    for name, value in {**job, "PYTHONSAFEPATH": "1", "SLURM_CONF": "/etc/s.conf", "TOOLKIT_RUN_DIR": "/r"}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("TOOLKIT_") and name != "TOOLKIT_RUN_DIR"]:
        monkeypatch.delenv(name)  # of the user who runs the tests
    notify.notify(run)
    assert said(tmp_path) == [RunResult.from_json(result).to_json()]
    environ = dict(line.split("=", 1) for line in (tmp_path / "note.env").read_text().splitlines() if "=" in line)
    told = {name: value for name, value in environ.items() if name.startswith("TOOLKIT_")}
    assert told == {
        "TOOLKIT_RUNS": str(tmp_path / "runs"),
        "TOOLKIT_NAME": "digits",
        "TOOLKIT_RUN": run.id,
        "TOOLKIT_FOLDER": str(run.path),
        "TOOLKIT_EVENT": "end",
        "TOOLKIT_STATE": "failed",
        "TOOLKIT_WHY": "rank 3 on node2: exit code 1",
    }
    assert {name for name in environ if name.startswith(("SLURM", "RANK"))} == {"SLURM_CONF"}  # it may sbatch
    assert environ["PYTHONPATH"] == "/lib/mine"


def test_a_word_with_blanks_dollars_and_quotes_arrives_as_it_is(run: RunDir, tmp_path: Path) -> None:
    words = ["a b", "$HOME", "it's; rm -rf /", ""]
    told_by(run, "sh", "-c", 'printf "%s\\n" "$@"', "sh", *words)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert (run.logs / "notify.log").read_text().splitlines() == words


@pytest.mark.parametrize(
    ("command", "words", "output"),
    [
        (["sh", "-c", "echo no route >&2; exit 3", "https://hook/secret"], "sh failed with exit code 3", "no route\n"),
        (["sh", "-c", "yes spam | head -c 9000000; exit 3"], "sh failed with exit code 3", "spam"),
    ],
    ids=["fails", "prints much"],
)
def test_its_failure_is_one_line_without_its_arguments(
    run: RunDir, heard: pytest.LogCaptureFixture, command: list[str], words: str, output: str
) -> None:
    told_by(run, *command)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    record = heard.records[0]
    assert words in record.getMessage()
    assert "secret" not in record.getMessage()
    assert (run.logs / "notify.log").read_text().find(output) in range(8)
    assert (run.logs / "notify.log").stat().st_size <= 1 << 16
    assert (run.logs / "notify.log").stat().st_mode & 0o077 == 0


def test_one_that_does_not_end_is_killed_with_what_it_started(
    run: RunDir, heard: pytest.LogCaptureFixture, change_limits: ChangeLimits
) -> None:
    change_limits(notice_s=0.5)
    told_by(run, "sh", "-c", "sleep 300 & sleep 300")
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert "sh was not done in time and is killed" in heard.text
    wait_for(lambda: not processes_with(f"TOOLKIT_FOLDER={run.path}"), 10, "the end of what it started")


def test_a_config_that_cannot_be_read_is_one_line_too(run: RunDir, heard: pytest.LogCaptureFixture) -> None:
    run.config.write_text("notfy: [x]\n")
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    (record,) = heard.records
    assert "notfy: unknown key" in record.getMessage()


def test_without_a_command_nothing_is_called_or_said(run: RunDir, heard: pytest.LogCaptureFixture) -> None:
    told_by(run)
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert heard.records == []
    assert not (run.logs / "notify.log").exists()


def test_it_is_called_once_at_the_end_of_all_attempts(run: RunDir, tmp_path: Path) -> None:
    seen: list[int] = []

    def crashes(ranks: Ranks) -> None:
        seen.append(len(said(tmp_path)))
        ranks.events.put(ended(1))

    assert supervise(run, Ranks(crashes, completes)) == 0
    assert seen == [0]
    assert [told["state"] for told in said(tmp_path)] == ["completed"]


def test_it_is_called_when_the_run_is_given_up(run: RunDir, tmp_path: Path) -> None:
    assert supervise(run, Ranks(lambda ranks: ranks.events.put(ended(1))), max_failures=0) == 1
    (told,) = said(tmp_path)
    assert (told["state"], told) == ("failed", run.result().to_json())


@pytest.mark.parametrize(("wanted", "state"), [(Intent.STOP, "stopped"), (Intent.CANCEL, "cancelled")])
def test_it_is_called_when_the_run_ends_before_it_starts_again(
    run: RunDir, tmp_path: Path, wanted: Intent, state: str
) -> None:
    user_requests.record_intent(run, wanted)
    supervise(run, Ranks())
    assert [told["state"] for told in said(tmp_path)] == [state]


def test_it_is_called_when_the_supervisor_itself_fails(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Supervisor, earlier_death: str | None) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Supervisor, "run", fails)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    with pytest.raises(SystemExit):
        entry.supervise(str(run.path), "local")
    assert [told["why"] for told in said(tmp_path)] == ["the supervisor failed: RuntimeError: a bug"]


def test_a_supervisor_whose_result_is_damaged_still_ends_with_its_code(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "guarded", lambda *_: 75)
    monkeypatch.setattr(entry, "open_endpoint", lambda run: None)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    (run.path / "result.json").write_text('{"state": "unheard of"}')
    with pytest.raises(SystemExit) as ended:
        entry.supervise(str(run.path), "slurm")
    assert ended.value.code == 75


def test_a_run_tells_its_end_once_and_none_that_is_taken_back(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that Slurm takes back has no result. Slurm may start the job of a run that has ended."""
    monkeypatch.setattr(Supervisor, "_run_attempts", lambda self: Verdict("preempted", "requeue", ""))  # type: ignore[arg-type]
    Supervisor(run, JobConfig(), Allocation(("here",), (4,), 1), Ranks(), None).run()
    run.write_result(RunResult.from_json({"state": "completed"}))
    for _ in range(2):  # its supervisor was killed before it told: the next one does, and the one after it need not
        Supervisor(run, JobConfig(), Allocation(("here",), (4,), 1, restart_count=1), Ranks(), None).run()
    assert [told["state"] for told in said(tmp_path)] == ["completed"]


def test_a_command_of_several_lines_is_taken() -> None:
    configs.validate(configs.load_config(None, ['notify.command=[sh, -c, "echo done\\nmail me"]']))


# --------------------------------------------------------------------------------------------- other events, and people


def attempted(run: RunDir, number: int, cause: str, decision: str) -> None:
    run.add_attempt(
        AttemptRecord(
            number,
            ("a",),
            1.0,
            time.time() if number > 1 else 2.0,
            cause,
            decision,
            line=f"{cause} in attempt {number}",
        )
    )


@pytest.mark.parametrize(
    ("cause", "decision", "when", "event"),
    [
        ("crashed", "restart", ["failure"], "failure"),
        ("hang", "restart", ["end", "failure"], "failure"),
        ("preempted", "requeue", ["preemption"], "preemption"),
        ("timeout", "requeue", ["preemption", "failure"], "preemption"),
        ("moved", "restart", ["failure", "preemption"], None),
        ("preempted", "requeue", ["end", "failure"], None),
        ("crashed", "restart", ["end"], None),
    ],
)
def test_what_is_due_follows_from_the_last_attempt(
    run: RunDir, cause: str, decision: str, when: list[str], event: str | None
) -> None:
    attempted(run, 1, "crashed", "restart")
    attempted(run, 2, cause, decision)
    found = notify.due(run, when)
    assert [notice.event for notice in found] == ([event] if event else [])
    assert all(notice.why == f"{cause} in attempt 2" for notice in found)


def test_a_failed_end_is_one_notice(run: RunDir) -> None:
    attempted(run, 1, "crashed", "give_up")
    run.write_result(RunResult.from_json({"state": "failed", "why": "rank 0"}))
    assert [notice.event for notice in notify.due(run, ["end", "failure"])] == ["end"]
    assert [notice.event for notice in notify.due(run, ["failure"])] == ["failure"]
    assert notify.due(run, ["preemption", "first_step"]) == []


def test_a_run_that_is_resumed_tells_each_end(run: RunDir, tmp_path: Path) -> None:
    for _ in range(2):
        run.write_result(RunResult.from_json({"state": "stopped"}))
        notify.notify(run)
        notify.notify(run)
        run.clear_result()
    assert [told["state"] for told in said(tmp_path)] == ["stopped", "stopped"]


def test_a_failure_is_told_while_the_run_continues(run: RunDir, tmp_path: Path) -> None:
    settings = NotifyConfig(when=["failure"], command=[*TELL, str(tmp_path / "note")])
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=settings)))
    assert supervise(run, Ranks(lambda ranks: ranks.events.put(ended(1)), completes), settings) == 0
    (told,) = wait_for(lambda: said(tmp_path), 20, "the notice of a failure")
    assert (told["attempt"], told["decision"]) == (1, "restart")


def test_a_program_that_is_not_on_this_host_is_not_called_sent(run: RunDir, heard: pytest.LogCaptureFixture) -> None:
    told_by(run, "no-such-program")
    run.write_result(RunResult.from_json({"state": "completed"}))
    notify.notify(run)
    assert "there is no program no-such-program on" in heard.text
    assert not (run.path / notify.SENT).exists()


def test_the_first_step_is_told_only_while_the_run_has_not_ended(run: RunDir) -> None:
    progress, queue = RunProgress(step=7), {"queue": 7320.0}
    run.write_status(RunStatus(state=RunState.RUNNING, progress=progress, goodput=queue))
    (notice,) = notify.due(run, ["first_step"])
    assert notice.why == "step 7 is done, after 2 h 2 min in the queue"
    run.write_result(RunResult.from_json({"state": "failed"}))
    assert notify.due(run, ["first_step"]) == []


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        (OutputFigures(), None),
        (OutputFigures(step=0, total_steps=500), None),  # a bar that is drawn before the first step
        (OutputFigures(step=3, loss=0.5), "~step 3 is done"),
        (OutputFigures(epoch=1, loss=0.5), "~loss 0.5"),
        (OutputFigures(checkpoint="out/a.pt"), None),
    ],
)
def test_the_first_step_of_a_script_is_what_it_prints(run: RunDir, printed: OutputFigures, why: str | None) -> None:
    run.write_status(RunStatus(state=RunState.RUNNING, printed=printed))
    assert [notice.why for notice in notify.due(run, ["first_step"])] == ([why] if why else [])


def test_a_first_step_after_a_long_start_is_told_once_the_status_has_it(
    run: RunDir, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    """After the first minute the status is seldom written, and the notice is made of it."""
    change_limits(files_often_s=0.0, status_every_s=0.05)
    settings = NotifyConfig(when=["first_step"], command=[*TELL, str(tmp_path / "note")])
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=settings)))
    told = list[bool]()

    def steps_late(ranks: Ranks) -> None:
        ranks.report(step=0, step_start=0)

        def step() -> None:
            wait_for(lambda: run.status().state is RunState.RUNNING, 20, "the status of the start")
            ranks.report(step=1, step_start=0)
            with contextlib.suppress(AssertionError):
                told.append(bool(wait_for(lambda: said(tmp_path), 7, "the notice")))
            completes(ranks)

        threading.Thread(target=step, daemon=True).start()

    assert supervise(run, Ranks(steps_late), settings) == 0
    assert told


def test_a_secret_that_a_rank_has_printed_is_in_no_notice(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("hf_0123456789")
    config = JobConfig(secrets={"HF_TOKEN": str(tmp_path / "token")})
    config.notify.command = [*TELL, str(tmp_path / "note")]
    fsio.write_atomic(run.config, configs.dump_config(config))
    run.write_result(RunResult.from_json({"state": "failed", "why": "bad key hf_0123456789"}))
    notify.notify(run)
    assert [told["why"] for told in said(tmp_path)] == ["bad key [secret HF_TOKEN]"]
    assert "hf_0123456789" not in (tmp_path / "note.env").read_text()
    sender = notify.NoticeSender(run, config, lambda: ["seen: hf_0123456789"])
    (notice,) = notify.due(run, ["end"])
    assert "hf_0123456789" not in sender._text(notice)


class Webhook(BaseHTTPRequestHandler):
    """Refuses as many posts as it is told to, then takes them."""

    refusals: ClassVar[int] = 0  #: -1: it never ends its answer
    moves: ClassVar[bool] = False
    taken: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if Webhook.moves:
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        for _ in range(20 if Webhook.refusals < 0 else 0):
            with contextlib.suppress(OSError):
                self.wfile.write(b"H")
            time.sleep(0.2)
        if Webhook.refusals > 0:
            Webhook.refusals -= 1
            self.send_error(503)
            return
        Webhook.taken.append(json.loads(text)["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hook(run: RunDir, tmp_path: Path) -> Iterator[Path]:
    """Return the file with the address of a webhook that the run tells its end."""
    Webhook.refusals, Webhook.moves, Webhook.taken = 0, False, []
    file = tmp_path / "hook"
    server = HTTPServer(("127.0.0.1", 0), Webhook)
    fsio.write_atomic(file, f"http://127.0.0.1:{server.server_port}/T0/secret\n")
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=NotifyConfig(slack=str(file)))))
    run.write_result(RunResult.from_json({"state": "failed", "why": "rank 3 on node2: CUDA out of memory"}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield file
    server.shutdown()
    server.server_close()


def test_a_webhook_that_is_away_for_a_moment_is_called_again(run: RunDir, hook: Path) -> None:
    Webhook.refusals = 1
    notify.notify(run, lambda: ["cause: it was too big"])
    notify.notify(run)
    (text,) = Webhook.taken
    assert text.splitlines()[:2] == ["*digits failed: rank 3 on node2: CUDA out of memory*", "cause: it was too big"]


def test_an_address_is_in_no_file_of_the_run(run: RunDir, hook: Path, heard: pytest.LogCaptureFixture) -> None:
    Webhook.refusals = 9
    notify.notify(run)
    assert "notify.slack: end was not sent: the webhook cannot be called from" in heard.text
    assert "Service Unavailable" in heard.text
    assert "secret" not in heard.text
    files = [path.read_text() for path in run.path.rglob("*") if path.is_file()]
    assert files
    assert not [text for text in files if "/T0/" in text]


def test_a_webhook_that_answers_drop_by_drop_holds_no_end(
    run: RunDir, hook: Path, heard: pytest.LogCaptureFixture, change_limits: ChangeLimits
) -> None:
    Webhook.refusals = -1
    change_limits(notice_s=1.0)
    began = time.monotonic()
    notify.notify(run)
    assert time.monotonic() - began < 10
    assert "it does not answer" in heard.text


def test_a_webhook_that_sends_elsewhere_has_not_taken_the_text(run: RunDir, hook: Path) -> None:
    Webhook.moves = True
    notify.notify(run)
    assert not (run.path / notify.SENT).exists()


@pytest.mark.parametrize("content", ["hooks.slack.com/T0/secret", "file:///etc/passwd", "https://a\nhttps://b"])
def test_a_file_that_holds_no_address_is_refused_without_showing_it(hook: Path, content: str) -> None:
    hook.write_text(content)
    with pytest.raises(ConfigError, match=r"^notify\.slack: on .*begins with https") as refused:
        configs.validate(configs.load_config(None, [f"notify.slack={hook}"]))
    assert content not in str(refused.value)


def test_a_webhook_that_others_may_read_is_refused(hook: Path) -> None:
    hook.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^notify\.slack: on .*chmod 600"):
        configs.validate(configs.load_config(None, [f"notify.slack={hook}"]))


def test_a_mail_goes_to_this_hosts_mail_service(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sendmail").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/args; cat > {tmp_path}/mail\n")
    (tmp_path / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(notify=NotifyConfig(mail="me@example.org"))))
    run.write_result(RunResult.from_json({"state": "failed", "why": "two\nlines: Füße"}))
    notify.notify(run, lambda: ["next: toolkit resume"])
    assert (tmp_path / "args").read_text() == "-t -oi\n"
    mail = message_from_bytes((tmp_path / "mail").read_bytes(), policy=policy.default)
    assert (mail["To"], mail["Subject"]) == ("me@example.org", "digits failed: two lines: Füße")
    body = mail.get_body()
    assert body is not None
    assert body.get_content().splitlines() == ["next: toolkit resume", f"run: {run.id}", f"folder: {run.path}"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["notify.when=[end, ended]", "notify.command=[sh]"], r"^notify\.when: .*first_step"),
        (["notify.when=[failure]"], r"^notify\.when: no message has a recipient; set notify\.command"),
        (["notify.mail=me"], r"^notify\.mail: 'me' is not a mail address"),
        (["notify.slack=hook"], r"^notify\.slack: 'hook' is relative"),
        (["notify.slack=/no/hook"], r"^notify\.slack: on .*/no/hook cannot be read"),
    ],
)
def test_what_tells_nobody_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.validate(configs.load_config(None, overrides))


def test_mail_is_refused_where_no_service_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program, **_: None)
    with pytest.raises(ConfigError, match=r"^notify\.mail: .* has no sendmail.*cluster\.extra"):
        configs.validate(configs.load_config(None, ["notify.mail=me@example.org"]))
