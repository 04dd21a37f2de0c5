"""Notices of what becomes of a run: to the user's own command, to a Slack channel, by mail.

What is due follows from the run's files. So a notice that could not be sent, or whose supervisor was killed, is sent at
the next look. `SENT` lists those that were: none is sent twice. Nothing here can change the run or its end.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import EmailMessage
from queue import Empty, SimpleQueue

from toolkit import config as configs
from toolkit.base import fsio, logs, secret_values
from toolkit.base.durations import in_units
from toolkit.base.errors import ToolkitError
from toolkit.base.process_limits import limits
from toolkit.base.terminal import visible
from toolkit.config import JobConfig
from toolkit.config.validation import sendmail_path
from toolkit.files.records import FileRecord
from toolkit.files.run_files import RunState, Time
from toolkit.files.rundir import RunDir
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.user_script import restore_import_path
from toolkit.run.attempt.verdict import Cause, Decision
from toolkit.slurm.environment import submit_environment

SENT = "notices.jsonl"
#: Pauses before a message is sent once more.
PAUSES_S = (1.0, 4.0)
DONE = "is done"
#: Of a program's output so many last pieces of 4 KiB are kept, and so many letters of a reason: it is a variable, too.
KEPT_PIECES, MOST_LETTERS = 16, 4000
_JSON = {"Content-Type": "application/json"}
#: A run that gets `notify` late, by `toolkit resume`, does not tell what happened long before.
NEWS_S = 3600.0
#: What starts attempts again without a failure.
_NO_FAILURES = (Cause.MOVED, Cause.PREEMPTED)

log = logs.get(__name__)
_sending = threading.Lock()  # at the end of a run, the notice of an attempt may still be on its way


@dataclass(frozen=True)
class SentNotice(FileRecord):
    """A line of ``notices.jsonl``: a notice that a channel has taken."""

    key: str
    channel: str
    time: Time


@dataclass(frozen=True)
class Notice:
    """One thing that happened. ``key`` is the same each time that it is derived from the run's files."""

    key: str
    event: str
    state: str
    why: str
    facts: str  #: JSON, for the command's standard input


def due(run: RunDir, when: Sequence[str]) -> list[Notice]:
    """Return the news of the run that ``when`` asks for, sent or not, its end first: that of the last hour.

    Of what is older only the last attempt counts: its notice may wait since it was requeued.
    """
    found, result, attempts = list[Notice](), run.result(), run.attempts()
    if result is not None and ("end" in when or ("failure" in when and result.state is RunState.FAILED)):
        event = "end" if "end" in when else "failure"
        key = f"end {(run.path / 'result.json').stat().st_mtime_ns}"  # a run that is resumed ends once more
        found.append(Notice(key, event, result.state, result.why or "", json.dumps(result.to_json())))
    for each in attempts:
        if each is not attempts[-1] and each.ended < time.time() - NEWS_S:
            continue
        key, facts = f"attempt {each.attempt}", json.dumps(each.to_json())
        if "preemption" in when and each.decision == Decision.REQUEUE:
            found.append(Notice(key, "preemption", RunState.REQUEUED, each.line or "", facts))
        if "failure" in when and each.decision == Decision.RESTART and each.cause not in _NO_FAILURES:
            found.append(Notice(key, "failure", RunState.RESTARTING, each.line or "", facts))
    at = (status := run.status()).shown
    if "first_step" in when and result is None and (at.step or at.loss is not None):  # a script may print only a loss
        why = f"{'~' * status.is_guess}{f'step {at.step} is done' if at.step else f'loss {at.loss:g}'}"
        if (queue_s := status.goodput.get("queue", 0.0)) >= 60:
            why += f", after {in_units(queue_s)} in the queue"
        found.append(Notice("first_step", "first_step", RunState.RUNNING, why, json.dumps({"step": at.step})))
    return found


def notify(run: RunDir, explain: Callable[[], Sequence[str]] = tuple) -> None:
    """Send what is due and was not sent yet. Never raises.

    It takes ``notice_s`` at most, and as long again where another thread is sending. ``explain`` returns the lines that
    say why, for messages that people read.
    """
    try:
        config = configs.load_config(run.config, site=False)
        names = [name for name in ("command", "slack", "mail") if getattr(config.notify, name)]
        with _sending if names else contextlib.nullcontext():
            sender = NoticeSender(run, config, explain)
            path = run.path / SENT
            sent = {(line.key, line.channel) for line in SentNotice.read_lines(path)}
            for notice in due(run, config.notify.when) if names else ():
                for name in names:
                    if (notice.key, name) not in sent and sender.deliver(name, notice):
                        fsio.append_json_line(path, SentNotice(notice.key, name, time.time()).to_json())
    except (OSError, ToolkitError) as error:
        log.warning("notify: %s", error)


class NoticeSender:
    """Sends notices of a run, without the secrets that its ranks may have printed."""

    def __init__(self, run: RunDir, config: JobConfig, explain: Callable[[], Sequence[str]]) -> None:
        self._run, self._config, self._explain = run, config, explain
        self._deadline = time.monotonic() + limits().notice_s

    def deliver(self, name: str, notice: Notice) -> bool:
        """Return whether the channel ``name`` has taken it. A failure is tried again while there is time."""
        notice = replace(notice, why=self._masked(notice.why)[:MOST_LETTERS], facts=self._masked(notice.facts))
        for pause_s in (0.0, *PAUSES_S):
            if self._left_s() <= pause_s:
                break
            time.sleep(pause_s)
            try:
                {"command": self._call, "slack": self._post, "mail": self._mail}[name](notice)
            except (OSError, ToolkitError) as error:
                log.warning("notify.%s: %s was not sent: %s", name, notice.event, error)
            else:
                log.info("notify.%s: %s is sent", name, notice.event)
                return True
        return False

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _masked(self, text: str) -> str:
        return secret_values.masked_of(self._config.secrets, text)

    def _call(self, notice: Notice) -> None:
        """Run the command. Its exit code changes nothing: it may have acted before it failed."""
        command, run = self._config.notify.command, self._run
        if shutil.which(command[0]) is None:
            raise OSError(f"there is no program {command[0]} on {socket.gethostname()}")
        # Without its job's variables the command may submit another job. Without TOOLKIT_RUN_DIR, too: that job would
        # find it, and continue in the ended run's folder.
        environ = {
            **restore_import_path(submit_environment(os.environ), run.code),
            "TOOLKIT_RUNS": str(run.path.parent.parent),
            "TOOLKIT_NAME": run.name,
            "TOOLKIT_RUN": run.id,
            "TOOLKIT_FOLDER": str(run.path),
            "TOOLKIT_EVENT": notice.event,
            "TOOLKIT_STATE": notice.state,
            "TOOLKIT_WHY": notice.why,
        }
        # Without its arguments: one may be the secret address of a webhook.
        log.info("notify: %s %s", command[0], self._run_program(command, environ, notice.facts))

    def _post(self, notice: Notice) -> None:
        """Post to the webhook whose address is in the user's file. Raises ConfigError or OSError, without it."""
        address = secret_values.webhook("notify.slack", str(self._config.notify.slack))
        text = html.escape(f"*{self._title(notice)}*\n{self._text(notice)}", quote=False)  # as Slack's own markup asks
        request = urllib.request.Request(address, json.dumps({"text": text}).encode(), _JSON)
        answers: SimpleQueue[object] = SimpleQueue()

        def post() -> None:
            try:
                with urllib.request.build_opener(_NoRedirect).open(request, timeout=limits().notice_s / 3):
                    answers.put(None)
            except (OSError, ValueError, http.client.HTTPException) as error:
                answers.put(getattr(error, "reason", None) or type(error).__name__)

        # A time limit of a socket is one of each read: an answer that comes drop by drop would take for ever.
        threading.Thread(target=post, daemon=True).start()
        try:
            problem = answers.get(timeout=min(max(self._left_s(), 0.1), limits().notice_s / 3))
        except Empty:
            problem = "it does not answer"
        if problem is not None:
            raise OSError(f"the webhook cannot be called from {socket.gethostname()}: {problem}")

    def _mail(self, notice: Notice) -> None:
        """Hand a mail to this host's own mail service. Raises OSError if it does not take it."""
        message = EmailMessage()
        message["To"], message["Subject"] = str(self._config.notify.mail), self._title(notice)
        message.set_content(self._text(notice))
        how = self._run_program([sendmail_path() or "sendmail", "-t", "-oi"], os.environ, message.as_string())
        if how != DONE:
            raise OSError(f"sendmail on {socket.gethostname()} {how}")

    def _title(self, notice: Notice) -> str:
        """Return one line for people, without what a mail's header must not hold."""
        return visible(" ".join(f"{self._run.name} {notice.state}: {notice.why}".split())[:200])

    def _text(self, notice: Notice) -> str:
        why = () if notice.event == "first_step" else self._explain()
        return "\n".join(
            [*self._masked("\n".join(why)).splitlines(), f"run: {self._run.id}", f"folder: {self._run.path}"]
        )

    def _run_program(self, command: Sequence[str], environ: Mapping[str, str], text: str) -> str:
        """Return how a program went that reads ``text``. The end of its output goes to ``notify.log``."""
        path = self._run.logs / "notify.log"
        with os.fdopen(os.memfd_create("notice"), "w+") as stdin:
            stdin.write(text)
            stdin.seek(0)
            process = start_child(
                command, environ, end_by=signal.SIGKILL, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        output, pieces = process.stdout, deque[bytes](maxlen=KEPT_PIECES)
        assert output is not None

        def read() -> None:
            with output:
                pieces.extend(iter(lambda: os.read(output.fileno(), 4096), b""))

        reading = threading.Thread(target=read, daemon=True)  # what it has left in the background may keep the pipe
        reading.start()
        try:
            code = process.wait(max(self._left_s(), 0.1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it has left in the background
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reading.join(1.0)
            with open_log(path) as kept:
                kept.write(b"".join(tuple(pieces)))
        if code is None:
            return f"was not done in time and is killed; its output: {path}"
        return DONE if code == 0 else f"failed with exit code {code}; its output: {path}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected post becomes a GET without the text, which the other side may well answer with success."""

    def redirect_request(self, *_: object) -> None:
        return None
