"""Text of others is shown by a terminal and never obeyed, on every way to it."""

import ast
import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path

import pytest

from tests.command import Command
from tests.unit.attempts import attempt
from toolkit.base import fsio, logs, terminal
from toolkit.base.errors import JobFailedError
from toolkit.base.terminal import EscapingStream, guarded, unguarded, visible
from toolkit.cli import follow, run_rows
from toolkit.cli import main as cli
from toolkit.cli import watch_view as watch
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.files.rundir import RunDir

PACKAGE = Path(rundir.__file__).parent
#: It sets the title, clears the screen, goes back to the line's start, and turns the direction round.
EVIL = "\x1b]0;title\x07\x1b[2J\rgood\u202e\x9b2J\u2066\u200b"
#: Characters of these categories are obeyed, or not seen.
HIDDEN = {"Cc", "Cf", "Zl", "Zp"}
#: Those that are parts of the text: the ends of lines, joiners, and signs of Arabic, Syriac and Kaithi.
SEEN = {*"\n\t\u200c\u200d\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd", *map(chr, range(0x600, 0x606))}


def is_harmless(text: str) -> bool:
    return not [mark for mark in text if mark not in SEEN and unicodedata.category(mark) in HIDDEN]


def test_every_control_and_direction_character_is_visible() -> None:
    every = list(map(chr, range(sys.maxunicode + 1)))
    hidden = [mark for mark in every if unicodedata.category(mark) in HIDDEN and mark not in SEEN]
    assert [mark for mark in hidden if not visible(mark).isascii()] == []
    others = [mark for mark in every if unicodedata.category(mark) not in {*HIDDEN, "Cn"} or mark in SEEN]
    assert [mark for mark in others if visible(mark) != mark] == []


def test_plain_text_and_the_lines_of_a_page_stay_as_they_are() -> None:
    assert visible("naïve 模型\n\tλ = 1e-3 👩\u200d🚀") == "naïve 模型\n\tλ = 1e-3 👩\u200d🚀"
    assert visible("\x1b[1;31mred\x1b[0m \x1b[8mhidden\x1b[m") == "red hidden"
    assert visible("\x1b]0;x\x07\u202e") == "\\x1b]0;x\\x07\\u202e"


def test_what_is_printed_is_visible_and_a_users_own_code_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with guarded(), guarded():
        print(EVIL)
        print(EVIL, file=sys.stderr)
        sys.stdout.writelines([EVIL])
        with unguarded():
            print("\r 10 %", end="")
        logs.setup()
        logs.get("x").warning(EVIL)
        terminal.console().print(EVIL, highlight=False)
    out, err = capsys.readouterr()
    assert "\r 10 %" in out
    assert is_harmless(out.replace("\r 10 %", ""))
    assert "\\x1b]0;title" in out
    assert is_harmless(err)
    print("\x1b", end="")
    assert capsys.readouterr().out == "\x1b", "the streams are as before"


def test_a_drawn_bar_keeps_the_commands_that_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(sys, "stdout", EscapingStream(drawn))
    console = terminal.console(force_terminal=True, color_system="standard", width=300, highlight=False)
    console.print(f"[red]{EVIL}[/]")
    assert drawn.getvalue().startswith("\x1b[31m"), "the colour is ours"
    assert is_harmless(re.sub("\x1b\\[[0-9;]*m", "", drawn.getvalue()))


def evil_run() -> rundir.RunDir:
    """Make a run whose logs, errors and host names are commands to a terminal."""
    run = rundir.create("digits")
    run.config.write_text("")
    failure = {"rank": 0, "host": EVIL, "how": EVIL}
    run.add_attempt(attempt(1, "crashed", "give_up", step_end=7, first_failure=failure, line=EVIL))
    fsio.make_dir(run.attempt_logs(1), parents=1)
    said = {"rank": 0, "host": EVIL, "time": 1.0, "type": "Error", "message": EVIL, "traceback": f"{EVIL}\n"}
    fsio.write_json(run.error_file(1, 0), said)
    run.rank_log(1, 0).write_text(f"{EVIL}\n")
    (run.logs / "supervisor.log").write_text(f"{EVIL}\n")
    run.write_status(RunStatus.from_json({"state": "failed", "degraded_nodes": {EVIL: EVIL}}))
    run.write_result(RunResult.from_json({"state": "failed", "attempts": 1, "why": EVIL, "metrics": {EVIL: 1.0}}))
    return run


COMMANDS = (
    *("why RUN", "status RUN", "status --columns run,why,nodes", "compare RUN RUN", "compare RUN RUN --json"),
    *("logs RUN", "logs RUN --rank 0", "logs RUN --merged", "logs RUN --errors", "logs RUN --follow", "watch"),
    *("stop RUN", "cancel RUN", "checkpoint list RUN", "report RUN", "sync RUN csv", "rm RUN"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_lets_a_run_speak_to_the_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = evil_run()
    monkeypatch.chdir(tmp_path)
    cli.main(command.replace("RUN", run.id).split())
    out, err = capsys.readouterr()
    assert out + err
    assert is_harmless(out), out
    assert is_harmless(err), err
    for page in tmp_path.glob("*.html"):
        assert is_harmless(page.read_text())


def test_errors_names_and_words_of_the_command_line_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    assert is_harmless(command.refuses("why", EVIL))
    assert is_harmless(command.refuses("why", "x", f"--{EVIL}"))
    # What a Python program is told, too: its traceback passes no guard.
    assert is_harmless(str(JobFailedError(EVIL)))


def test_a_followed_run_and_the_screen_of_watch_are_visible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from toolkit.run.submission.handle import Run

    run = evil_run()
    follow.to_the_end(Run(run, "local", "1"), bar=False)
    assert is_harmless(capsys.readouterr().out)
    drawn = io.StringIO()
    monkeypatch.setattr(sys, "stdout", EscapingStream(drawn))
    rows = run_rows.status_rows([run])
    terminal.console(width=200, highlight=False).print(watch.render_screen(rows, (), 200, 20))
    assert is_harmless(drawn.getvalue())


#: Prints what a run's reader sees: its page, its row, the end of `--follow`, a refusal and a warning.
_READER = """
import sys
from toolkit.base import logs
from toolkit.files import rundir
from toolkit.cli import follow
from toolkit.cli.main import main
from toolkit.run.submission.handle import Run
for words in (["why"], ["status"], ["stop"], ["resume", "data.nmae=x"]):
    main([words[0], sys.argv[1], *words[1:]])
follow.to_the_end(Run(rundir.find(sys.argv[1]), "local", "1"), bar=True)
logs.get("x").warning("it is to be resumed by `toolkit resume %s --code`, which is a command to copy", sys.argv[1])
"""


def test_no_command_to_copy_is_broken_by_a_terminal_of_80_columns(run: RunDir) -> None:
    run.config.write_text("")
    failure = {"rank": 2, "host": "node2", "how": "RuntimeError: a message of several words", "where": "jobs/x.py:12"}
    run.add_attempt(attempt(1, "crashed", "give_up", step_end=120, first_failure=failure))
    why = (
        f"the queue is full of words; `toolkit resume {run.id} cluster.mem_gb=2` continues, as does `toolkit resume x`"
    )
    run.write_result(RunResult.from_json({"state": "failed", "attempts": 1, "metrics": {}, "why": why}))
    command = [sys.executable, "-c", _READER, run.id]
    piped = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=os.environ | {"TERM": "dumb"}):
        os.close(side)
        seen = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(main, 4096):
                seen += data
        os.close(main)
    lines = seen.decode().replace("\r\n", "\n").split("\n")
    commands = set(re.findall("`[^`]*`", piped))
    assert {f"`toolkit resume {run.id} cluster.mem_gb=2`", f"`toolkit resume {run.id} --code`"} <= commands
    assert [each for each in commands if not any(each in line for line in lines)] == []
    # Wider are only a path and a list of words that nothing can break, each on a line of its own.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1 and line[:4] != "    "] == []
    # In a pipe each sentence is one line.
    assert f"failed: {why}" in piped.splitlines()


def test_a_line_is_broken_between_words_and_never_in_a_command() -> None:
    assert terminal.wrapped("one two `a b c` three", 12) == "one two\n  `a b c`\n  three"
    assert terminal.wrapped("  short\n\n  in (`a b`), end", 11) == "  short\n\n  in\n    (`a b`),\n    end"
    assert terminal.wrapped("    toolkit resume x", 10) == "    toolkit resume x"
    assert terminal.wrapped("longer-than-a-line ` x", 10) == "longer-than-a-line\n  ` x"


def test_there_is_no_other_way_to_the_terminal() -> None:
    """Everything that reaches the real streams, or makes a rich console or a log's lines, is in a known place."""
    known = {
        "terminal.py": {"Console", "redirect_stdout", "redirect_stderr"},
        "cli/commands/evaluate.py": {"buffer"},  # into a pipe, with each file's name byte for byte
        "data/datasets.py": {"redirect_stdout"},
        "run/submission/executors.py": {"redirect_stderr"},  # into a buffer that is thrown away
        "logs.py": {"StreamHandler", "Formatter"},
    }
    words = {"__stdout__", "__stderr__", "buffer", "Console", "redirect_stdout", "redirect_stderr", "StreamHandler"}
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                is_stream = node.attr != "buffer" or ast.unparse(node.value) in ("sys.stdout", "sys.stderr")
                used = node.attr if is_stream else ""
            elif isinstance(node, ast.alias):
                used = node.name.rpartition(".")[2]
            else:
                continue
            is_format = used == "Formatter" and "logging" in text
            if (used in words or is_format) and used not in known.get(name, set()):
                if used == "Console" and name in TYPED_ONLY:
                    continue
                found.append(f"{name}:{getattr(node, 'lineno', '?')}: {used}")
    assert found == []


#: They name the class in annotations.
TYPED_ONLY = {"cli/follow.py", "cli/progress.py"}
