"""`toolkit --on LOGIN` over a real sshd: a banner, blanks in paths, another home and environment, lines that break."""

import base64
import contextlib
import hashlib
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.sshd import LoginNode, login_node, make_environment
from tests.waiting import PATIENCE, wait_for
from toolkit import __version__
from toolkit.base.errors import EXIT_FAILED, EXIT_REQUEST, EXIT_STOPPED, RequestError
from toolkit.run.prepare import snapshot

LOCAL = ("exec", "--executor", "local", "--follow", "--name")
#: Says what it got, and waits until it may end.
WAITS = """
import pathlib, sys, time
pathlib.Path("started").write_text("output of the script")
print(sys.argv[1:], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
sys.exit(int(pathlib.Path("go").read_text()))
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    with login_node(tmp_path_factory.mktemp("on")) as node:
        (node.project / "train.py").write_text(WAITS)
        missing = node("--on", "login", "status", code=EXIT_REQUEST)
        assert "`toolkit site init --on login`" in missing
        make_environment(node.home / "my env")
        node("site", "init", "--on", "login", "--env", "~/my env")
        yield node


def ends(node: LoginNode, name: str, code: int) -> None:
    (node.there / "go").write_text(str(code))
    node("--on", "login", "follow", name, code=EXIT_FAILED if code else 0)
    for each in ("go", "started"):
        (node.there / each).unlink()


def test_files_go_there_arguments_stay_whole_and_the_exit_code_comes_back(node: LoginNode, tmp_path: Path) -> None:
    (node.project / "old name.py").write_text("")
    (node.project / ".env").write_text("PASSWORD=1")
    said = node("--on", "login", "exec", "--executor", "local", "--json", "--name", "args", "--", "python", "train.py",
                "a b", "it's", '"$HOME"', "!x")  # fmt: skip
    assert json.loads(said)["name"] == "args", "no banner stands before the answer"
    wait_for((node.there / "started").exists, 60, "the script has started")
    names = {path.name for path in node.there.iterdir()}
    assert {"train.py", "old name.py", "runs", "started"} <= names
    assert ".env" not in names

    (node.project / "old name.py").rename(node.project / "new.py")
    with node.popen("--on", "login", "resume", "nothing") as process:
        _, err = process.communicate()
    assert process.returncode == EXIT_REQUEST
    assert ": 2 of 3 files sent" in err or ": 1 of 3 files sent" in err
    names = {path.name for path in node.there.iterdir()}
    assert "old name.py" not in names, "the project has it no more"
    assert {"new.py", "started", "runs"} <= names, "what the script has written stays"
    ends(node, "args", 0)
    assert str(["a b", "it's", '"$HOME"', "!x"]) in node("--on", "login", "logs", "args")
    (node.there / "output.py").write_text("")
    snapshot.take(node.there, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"new.py", "train.py", "SNAPSHOT.json"}


def test_a_run_survives_its_connection_and_the_command_says_how_to_look(node: LoginNode) -> None:
    following = node.popen("--on", "login", *LOCAL, "cut", "--", "python", "train.py")
    with following:
        wait_for(lambda: any(node.home.glob("toolkit/my-project-*/started")), 60, "the script has started")
        (ssh,) = [pid for pid in children(following.pid) if b"\0-T\0" in command_of(pid)]
        os.kill(ssh, signal.SIGKILL)
        _, err = following.communicate()
    assert following.returncode == 255
    assert "`toolkit --on login status`" in err
    wait_for(lambda: not commands_there(node), 20, "no command of the laptop is left there")
    assert '"state": "running"' in node("--on", "login", "status", "cut", "--json")
    ends(node, "cut", 3)
    assert "toolkit --on login why" in node("--on", "login", "follow", "cut", code=EXIT_FAILED)


def test_a_line_that_falls_silent_is_given_up_and_the_run_continues(node: LoginNode) -> None:
    node.hang_up()
    with node.ssh_config("ServerAliveInterval 1", is_slow=True):
        following = node.popen("--on", "login", *LOCAL, "silent", "--", "python", "train.py")
        with following:
            wait_for(lambda: any(node.home.glob("toolkit/my-project-*/started")), 60, "the script has started")
            line = [pid for pid in all_processes() if f"{node.folder}/sshd_config".encode() in command_of(pid)]
            for pid in line:
                os.kill(pid, signal.SIGSTOP)
            _, err = following.communicate(timeout=60)
            for pid in line:
                os.kill(pid, signal.SIGCONT)
    assert following.returncode == 255
    assert "`toolkit --on login status`" in err
    wait_for(lambda: not commands_there(node), 20, "no command of the laptop is left there")
    ends(node, "silent", 0)


def test_over_a_slow_line_files_and_output_arrive_whole(node: LoginNode) -> None:
    node.hang_up()
    noise = os.urandom(100_000)
    (node.project / "weights.bin").write_bytes(noise)
    with node.ssh_config(is_slow=True):
        node("--on", "login", "exec", "--executor", "local", "--name", "slow", "--", "python", "train.py")
        assert (node.there / "weights.bin").read_bytes() == noise
        ends(node, "slow", 0)
    node.hang_up()
    (node.project / "weights.bin").unlink()


def test_ctrl_c_at_a_terminal_leaves_the_run_and_says_how_to_come_back(node: LoginNode) -> None:
    node("--on", "login", "exec", "--executor", "local", "--name", "left", "--", "python", "train.py")
    wait_for((node.there / "started").exists, 60, "the script has started")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(node.project)
        words = [sys.executable, "-m", "toolkit", "--on", "login", "follow", "left"]
        os.execve(sys.executable, words, node.environ | {"TERM": "dumb"})
    seen = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while piece := os.read(terminal, 4096):
            seen += piece
            if b"running" in seen and b"^C" not in seen:
                os.write(terminal, b"\x03")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_STOPPED, seen
    words_seen = " ".join(seen.decode().split())
    assert "continues without this terminal" in words_seen
    assert "`toolkit --on login follow" in words_seen
    assert '"state": "running"' in node("--on", "login", "status", "left", "--json")
    ends(node, "left", 0)


@pytest.mark.parametrize("code", [126, 127])
def test_an_exit_code_of_a_shell_is_not_taken_for_a_missing_toolkit(node: LoginNode, code: int) -> None:
    (node.project / "job.py").write_text("def main(config): ...\n")
    (node.project / "one.yaml").write_text("job: job.py\n")
    node("--on", "login", "shell", "one.yaml", "--executor", "local", "--", "sh", "-c", f"exit {code}", code=code)


def test_a_run_is_stopped_from_the_laptop_and_its_exit_code_says_so(node: LoginNode) -> None:
    following = node.popen("--on", "login", *LOCAL, "stopped", "--", "python", "train.py")
    with following:
        wait_for(lambda: any(node.home.glob("toolkit/my-project-*/started")), 60, "the script has started")
        node("--on", "login", "stop", "stopped")
        following.communicate()
    (node.there / "started").unlink()
    assert following.returncode == EXIT_STOPPED


def test_at_a_terminal_the_command_has_one_there(node: LoginNode) -> None:
    words = [sys.executable, "-m", "toolkit", "--on", "login", "shell", "--help"]
    seen = subprocess.run(
        ["script", "-qec", shlex.join(words), "/dev/null"], cwd=node.project, env=node.environ, capture_output=True
    )
    assert seen.returncode == 0
    assert b"usage: toolkit shell" in seen.stdout
    assert b"Connection" not in seen.stdout


def test_the_page_opens_here_and_ends_with_the_command(node: LoginNode) -> None:
    if not node.has_own_ports:
        pytest.skip("here laptop and login node share their ports: no network namespace without root")
    with node.popen("--on", "login", "serve") as serving:
        assert serving.stdout is not None
        said = ""
        while "http" not in said:
            said = serving.stdout.readline()
            assert said, serving.communicate()
        address = re.search(r"http://\S+", said)
        assert address is not None
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert b"<html" in opener.open(address[0], timeout=PATIENCE * 20).read()
        assert "ssh -N" not in serving.stdout.readline(), "the tunnel is there"
        os.killpg(serving.pid, signal.SIGINT)
        serving.communicate()
    wait_for(lambda: not commands_there(node), 20, "the server there has ended")


@pytest.mark.parametrize(
    ("field", "value", "code", "advice"),
    [
        ("toolkit", "/nowhere/toolkit", EXIT_REQUEST, "`toolkit site init --on login` brings it"),
        ("projects", "/dev/null/x", EXIT_REQUEST, "/dev/null"),
    ],
)
def test_what_is_wrong_there_is_said_with_what_to_do(
    node: LoginNode, field: str, value: str, code: int, advice: str
) -> None:
    path = Path(node.environ["HOME"]) / ".config/toolkit/logins/login.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {field: value}))
    try:
        assert advice in node("--on", "login", "submit", "train.py", code=code)
    finally:
        path.write_text(before)


def test_no_connection_is_255_and_a_name_that_is_an_option_is_refused(node: LoginNode) -> None:
    assert "there is no connection" in node("site", "init", "--on", "gone", code=255)
    assert "--on: the name" in node("--on", "-oProxyCommand=touch x", "status", code=EXIT_REQUEST)
    assert "--on: the name" in node("exec", "--on", "--", "true", code=EXIT_REQUEST)


def test_another_version_there_is_refused_and_half_an_archive_changes_nothing(tmp_path: Path) -> None:
    assert f"login has toolkit {__version__}, the laptop 0.0.1" in refusal(there(tmp_path, version="0.0.1"))
    written = archive({"a.py": os.urandom(100_000)})
    for cut in (0, 10, 50_000, None):  # the last one is whole, but for the list of all files
        assert "before all files had arrived" in refusal(there(tmp_path), written[:cut])
        assert [*tmp_path.iterdir()] == []


def test_what_several_commands_send_at_once_is_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(*numbers: int) -> tuple[dict[str, bytes], bytes]:
        files = {f"{name}.py": b"%d" % number for name, number in zip("ab", numbers, strict=True)}
        listed = {name: f"file {hashlib.sha256(content).hexdigest()}" for name, content in files.items()}
        return files, json.dumps(listed).encode()

    first, second, third = versions(1, 1), versions(2, 2), versions(1, 3)
    for files, listed in (first, second):
        late = there(tmp_path)
        assert late.stdout is not None
        assert [late.stdout.readline(), late.stdout.readline()] == [b"\n", b"t\n"]
        known = json.loads(late.stdout.readline())
        with there(tmp_path) as process:
            process.communicate(archive(files | {snapshot.SENT: listed}))
        assert process.returncode == 0
        if known:  # of the first ones; the second ones have come since
            assert "have changed while others came" in refusal(late, archive({"b.py": b"3", snapshot.SENT: third[1]}))
        else:  # sends all, so that there is nothing to mix
            late.communicate(archive(files | {snapshot.SENT: listed}))
            assert late.returncode == 0
        assert {name: (tmp_path / name).read_bytes() for name in files} == files
    old, new = (hashlib.sha256(listed).hexdigest() for _, listed in (first, second))
    assert "has sent other files there" in refusal(there(tmp_path, sent=old, words=["status"]))
    monkeypatch.setitem(snapshot.EXPECTED, tmp_path.resolve(), old)
    with pytest.raises(RequestError, match="has sent other files there"):
        snapshot.take(tmp_path, tmp_path / "copy")
    monkeypatch.setitem(snapshot.EXPECTED, tmp_path.resolve(), new)
    snapshot.take(tmp_path, tmp_path / "copy")
    assert (tmp_path / "copy/b.py").read_bytes() == b"2"


def there(folder: Path, **asked: Any) -> "subprocess.Popen[bytes]":
    """Start what ssh starts on the login node: by default it takes files into ``folder``."""
    asked = {"version": __version__, "login": "login", "folder": str(folder), "token": "t", **asked}
    text, pipe = base64.urlsafe_b64encode(json.dumps(asked).encode()).decode(), subprocess.PIPE
    command = [sys.executable, "-m", "toolkit", "__there", text]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def refusal(process: "subprocess.Popen[bytes]", given: bytes = b"") -> str:
    _, err = process.communicate(given)
    assert process.returncode == EXIT_REQUEST
    return err.decode()


def archive(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w|gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def test_a_folder_may_become_a_file_and_outputs_keep_theirs(node: LoginNode) -> None:
    package = node.project / "package"
    package.mkdir()
    (package / "module.py").write_text("")
    node("--on", "login", "resume", "nothing", code=EXIT_REQUEST)
    there = node.there / "package"
    (there / "__pycache__").mkdir()
    (package / "module.py").unlink()
    package.rmdir()
    package.write_text("a file")
    (there / "result.txt").write_text("of a script")
    said = node("--on", "login", "resume", "nothing", code=EXIT_REQUEST)
    assert f"{there}: Is a directory" in said
    (there / "result.txt").rename(node.there / "result.txt")
    there.rmdir()
    node("--on", "login", "resume", "nothing", code=EXIT_REQUEST)
    assert there.read_text() == "a file"
    package.unlink()
    node("--on", "login", "resume", "nothing", code=EXIT_REQUEST)
    assert not there.exists()


def test_a_login_node_that_runs_something_else_than_the_command_is_told(node: LoginNode) -> None:
    keys = node.folder / "keys"
    before = keys.read_text()
    keys.write_text(f'command="echo closed today" {before}')
    node.hang_up()
    try:
        for word in ("status", "submit"):
            said = node("--on", "login", word, code=EXIT_REQUEST)
            assert "closed today" in said
    finally:
        keys.write_text(before)
        node.hang_up()


def test_a_list_of_sent_files_in_a_project_reaches_nothing_outside(node: LoginNode, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "private.txt").write_text("")
    (project / "link").symlink_to("..")
    for name in ("../private.txt", "..", "sub/../..", str(tmp_path / "private.txt"), "link/private.txt"):
        (project / snapshot.SENT).write_text(json.dumps({name: ""}))
        with pytest.raises(RequestError, match="outside this folder"):
            snapshot.take(project, tmp_path / "copy")
    (node.project / snapshot.SENT).write_text("{}")
    assert f"Remove {snapshot.SENT}" in node("--on", "login", "submit", code=EXIT_REQUEST)
    (node.project / snapshot.SENT).unlink()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def commands_there(node: LoginNode) -> list[int]:
    """Return the commands of the laptop that run on the login node."""
    env = str(node.home / "my env").encode()
    return [pid for pid in all_processes() if env in command_of(pid) and b"\0__there\0" in command_of(pid)]
