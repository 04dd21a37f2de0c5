"""`toolkit --on LOGIN COMMAND`, on a laptop: send the project's files to a login node, and run the command there.

All goes over the user's own ssh, with its config, agents and questions. The other side:
:mod:`toolkit.cli.login_side`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from toolkit import __version__
from toolkit.base import fsio, terminal
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, RequestError, ToolkitError
from toolkit.base.trust import cache_dir
from toolkit.files import records
from toolkit.files.records import JsonRecord

#: What ssh itself ends with when it cannot connect, or when the connection breaks.
EXIT_LOST = 255
#: These run files of the project.
SENDING = ("submit", "exec", "sweep", "run", "supervise", "resume", "resume-check", "shell")
#: Gives a command the environment of a login, in which sites set Slurm's PATH: sshd starts the user's shell without it.
#: In this text and in what follows it no shell, csh and fish among them, finds a character to expand.
_AS_AT_A_LOGIN = (
    'case "$SHELL" in */bash|*/zsh|*/ksh|*/fish) exec "$SHELL" -lc "$1";; *) exec sh -c "$1";; esac'  # csh has no -lc
)
_EXPANDED = frozenset("'\"\\$`!\n")
#: A longer folder and the 59 characters that ssh adds do not fit into the address of a socket: 104 bytes at the least.
_MOST_SOCKET_FOLDER = 45


@dataclass(frozen=True)
class LoginRecord(JsonRecord):
    """What the user's config remembers of a login node."""

    toolkit: str  #: the program there
    projects: str  #: the folder there for the files of projects
    laptop: str  #: tells the projects of several laptops apart


def main(words: Sequence[str]) -> int:
    """Run the command of ``words`` on the login node that they name, and return its exit code, or EXIT_LOST."""
    login, words = _without_login(words)
    if not words:
        raise RequestError("toolkit --on LOGIN: a command is missing; such as: toolkit --on LOGIN status")
    ssh = _ssh(login)
    if words[0] == "site":
        return _set_up(login, ssh, words)
    known = records.read_or_none(_path_of(login), LoginRecord)
    if known is None:
        raise RequestError(f"{login} is not set up yet: `toolkit site init --on {shlex.quote(login)}` does it, once")
    project = Path.cwd()
    number = hashlib.sha256(f"{known.laptop}:{project}".encode(errors="surrogateescape")).hexdigest()[:8]
    name = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "-" for each in project.name)
    there = _Request(login, ssh, known.toolkit, f"{known.projects}/{name}-{number}")
    sends = words[0] in SENDING and not {"-h", "--help", "--help-all"} & {*words}
    return there.run(words, there.send(project) if sends else None)


def _without_login(words: Sequence[str]) -> tuple[str, list[str]]:
    rest = [*words]
    place = next(place for place, word in enumerate(rest) if word == "--on" or word.startswith("--on="))
    _, equals, login = rest.pop(place).partition("=")
    if not equals and place < len(rest):
        login = rest.pop(place)
    if not login or login.startswith("-"):
        raise RequestError("--on: the name of a login node is missing, as ssh knows it: toolkit --on LOGIN status")
    return login, rest


def _path_of(login: str) -> Path:
    return fsio.expand("~/.config/toolkit/logins") / f"{quote(login, safe='@')}.json"


def _ssh(login: str) -> list[str]:
    """Return the words that run ssh to ``login``. What the user's own config sets stays."""
    try:
        done = subprocess.run(["ssh", "-G", "-T", "--", login], stdout=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise RequestError("toolkit --on: there is no ssh on PATH; install OpenSSH's client") from None
    if done.returncode != 0:
        raise RequestError(f"--on: ssh does not take the name {login!r}, or its config: see its message above")
    given = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    options = {"LogLevel": "ERROR"} if given.get("loglevel") == "INFO" else {}  # no "Connection to LOGIN closed."
    if given.get("serveraliveinterval", "0") == "0":
        options["ServerAliveInterval"] = "15"  # a line that is gone is seen after three of them
    if given.get("connecttimeout", "none") == "none":
        options["ConnectTimeout"] = "30"
    cache = cache_dir()
    if given.get("controlmaster", "false") in ("false", "no") and cache and len(str(cache)) <= _MOST_SOCKET_FOLDER:
        options |= {"ControlMaster": "auto", "ControlPath": f"{fsio.make_dir(cache)}/%C", "ControlPersist": "600"}
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        options["BatchMode"] = "yes"  # nobody can answer a question
    return ["ssh", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def _at_login(command: str) -> str:
    """Return the command line that runs ``command`` on the login node, whatever shell reads it."""
    return f"sh -c '{_AS_AT_A_LOGIN}' sh \"{command}\""


def _after_banner(stream: IO[bytes], token: str) -> bool:
    """Read up to the line ``token``. What the user's shell prints at a login stands before it, and is dropped.

    Where the line never comes, show on stderr what has come, and return False.
    """
    seen = []
    for line in iter(stream.readline, b""):
        if line.strip() == token.encode():
            return True
        seen.append(line.decode(errors="replace"))
    sys.stderr.write("".join(seen))
    return False


@dataclass(frozen=True)
class _Request:
    """A command, or files, for ``folder`` of the login node."""

    login: str
    ssh: Sequence[str]
    program: str
    folder: str

    def _command(self, **what: Any) -> str:
        asked = {"version": __version__, "login": self.login, "folder": self.folder, **what}
        text = base64.urlsafe_b64encode(json.dumps(asked).encode()).decode()
        return _at_login(f"'{self.program}' __there {text}")

    def send(self, project: Path) -> str:
        """Have ``folder`` hold the files of ``project``, as a snapshot takes them. Return the digest of their list.

        Only what differs is sent.
        """
        from toolkit.cli.login_side import digests
        from toolkit.run.prepare import snapshot

        if (project / snapshot.SENT).exists():
            raise RequestError(
                f"{project} is a copy of what was sent to a login node: its new files would be left out. "
                f"Remove {snapshot.SENT} there, and send again"
            )
        token = secrets.token_hex(8)
        theirs = None
        with tempfile.TemporaryDirectory() as temporary:
            code = Path(temporary) / "code"
            snapshot.take(project, code)
            files = digests(code, sorted(str(path.relative_to(code)) for path in code.rglob("*")))
            listed = json.dumps(files).encode()
            command = [*self.ssh, "-T", self.login, self._command(token=token)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ssh:
                assert ssh.stdin is not None
                assert ssh.stdout is not None
                if _after_banner(ssh.stdout, token):
                    theirs = json.loads(ssh.stdout.readline() or b"{}")
                    changed = [name for name, digest in files.items() if theirs.get(name) != digest]
                    with suppress(BrokenPipeError):  # its exit code tells
                        _write_archive(ssh.stdin, code, changed, listed)
                with suppress(BrokenPipeError):
                    ssh.stdin.close()
        if ssh.returncode != 0 or theirs is None:
            raise self._not_sent(ssh.returncode)
        done = f"{len(changed)} of {len(files)} files sent" if changed or files.keys() != theirs.keys() else "no change"
        terminal.say(f"{self.login}:{self.folder}: {done}", sys.stderr)
        return hashlib.sha256(listed).hexdigest()

    def _not_sent(self, code: int) -> ToolkitError:
        again = "nothing was submitted"
        if code == EXIT_LOST or code < 0:
            return _LostError(f"{self.login}: the connection failed, see the message of ssh above; {again}")
        if code in (126, 127):
            return RequestError(self._nothing_there())
        return RequestError(f"{self.login}: the files were not accepted, see the message above; {again}")

    def _nothing_there(self) -> str:
        return (
            f"{self.login}: there is no {self.program} there: "
            f"`toolkit site init --on {shlex.quote(self.login)}` brings it"
        )

    def run(self, words: Sequence[str], sent: str | None = None) -> int:
        """Run a command in ``folder``, on the files of this list, and return its exit code, or EXIT_LOST."""
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        token = "" if is_terminal else secrets.token_hex(8)
        options = ["-t" if is_terminal else "-T"]
        if words[0] == "serve":
            tunnel, words = _tunnel(words)
            options += tunnel
        command = [*self.ssh, *options, self.login, self._command(token=token, words=words, sent=sent)]
        given = None if is_terminal else subprocess.DEVNULL
        try:
            with subprocess.Popen(command, stdin=given, stdout=None if is_terminal else subprocess.PIPE) as ssh:
                try:
                    has_begun = ssh.stdout is None or _after_banner(ssh.stdout, token)
                    if ssh.stdout is not None:
                        while piece := ssh.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                            sys.stdout.buffer.write(piece)
                            sys.stdout.flush()
                    code = ssh.wait()
                except BaseException:
                    ssh.terminate()
                    raise
        except KeyboardInterrupt:
            terminal.say(f"\n{self._look_again(words)}", sys.stderr)
            raise
        # Files were sent through the program, so it is there, and the code is that of what it ran, such as a shell.
        if code in (126, 127) and words[0] not in SENDING:
            raise RequestError(self._nothing_there())
        if code == 0 and not has_begun:
            raise RequestError(f"{self.login}: it ran something other than the command, see what it printed above")
        if code != EXIT_LOST and code >= 0:
            return code
        raise _LostError(
            f"{self.login}: there was no connection, or it broke (ssh ended with {code}). {self._look_again(words)}"
        )

    def _look_again(self, words: Sequence[str]) -> str:
        again = "toolkit --on " + shlex.join([self.login, *(["status"] if words[0] in SENDING else words)])
        return f"What runs there continues without this command; to look again: `{again}`"


class _LostError(ToolkitError):
    """The login node cannot be reached, or not any more."""

    exit_code = EXIT_LOST


def _write_archive(stream: IO[bytes], code: Path, changed: Sequence[str], listed: bytes) -> None:
    """Write the changed files, and last the list of all: an archive without it did not come whole."""
    from toolkit.run.prepare import snapshot

    with tarfile.open(fileobj=stream, mode="w|gz") as archive:
        for name in changed:
            archive.add(code / name, name, recursive=False)
        entry = tarfile.TarInfo(snapshot.SENT)
        entry.size = len(listed)
        archive.addfile(entry, BytesIO(listed))


def _tunnel(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ssh's options that bring the page's port here, and the words with that port.

    A connection of its own: in a shared one the port would stay open after the command.
    """
    given = [word.partition("=")[2] or after for word, after in zip(words, [*words[1:], ""], strict=True)
             if word.partition("=")[0] == "--port"]  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = given[-1] if given else str(free.getsockname()[1])
    forward = f"127.0.0.1:{port}:127.0.0.1:{port}"
    options = ["-S", "none", "-o", "ExitOnForwardFailure=yes", "-L", forward]
    return options, [*words, *([] if given else ["--port", port])]


def _set_up(login: str, ssh: Sequence[str], words: Sequence[str]) -> int:
    """Find or make an environment with the toolkit on ``login``, remember it, and write that site's defaults."""
    from toolkit.cli.main import build_parser, parse

    args = parse(build_parser(("site",)), words)
    token = secrets.token_hex(8)
    script = _SET_UP % {
        "env": shlex.quote(args.env or ""),
        "force": int(args.force),
        "name": f"slurm_batch_toolkit-{__version__}-py3-none-any.whl",
        "token": token,
        "version": __version__,
        "wheel": base64.encodebytes(_wheel()).decode(),
    }
    command = [*ssh, "-T", login, _at_login("sh -s")]
    done = subprocess.run(command, input=script.encode(), stdout=subprocess.PIPE, check=False)
    if done.returncode in (EXIT_LOST, -1):
        raise _LostError(f"{login}: there is no connection, see the message of ssh above; `ssh {login}` must work")
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(token)]
    if done.returncode != 0 or not lines:
        raise RequestError(f"{login}: there is no environment with the toolkit, see the message above")
    program = lines[-1].removeprefix(token).strip()
    if _EXPANDED & {*program}:
        raise RequestError(f"{login}: the name {program} has a character that some shells expand; give another --env")
    path = _path_of(login)
    before = records.read_or_none(path, LoginRecord)
    laptop = before.laptop if before else secrets.token_hex(4)
    projects = args.projects or (before.projects if before else "~/toolkit")
    fsio.make_dir(path.parent)
    fsio.write_json(path, {"toolkit": program, "projects": projects, "laptop": laptop})
    terminal.say(f"{login}: {program}, projects in {projects}; remembered in {path}", sys.stderr)
    partition = ["--partition", args.partition] if args.partition else []
    asked = ["site", "init", *partition, *(["--force"] if args.force else [])]
    code = _Request(login, ssh, program, projects).run(asked)
    return EXIT_DONE if code in (EXIT_REQUEST, EXIT_FAILED) else code  # the site's own file, or none without Slurm


def _wheel() -> bytes:
    """Return this toolkit as a wheel, from the files that run here."""
    package, about = Path(__file__).parents[1], metadata.distribution("slurm-batch-toolkit")
    info = f"slurm_batch_toolkit-{__version__}.dist-info"
    files = {f"{info}/{name}": (about.read_text(name) or "").encode() for name in ("METADATA", "entry_points.txt")}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: toolkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"toolkit/{path.relative_to(package)}"] = path.read_bytes()
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return written.getvalue()


#: For sh on the login node, which reads it from its stdin.
_SET_UP = r"""
set -e
env=%(env)s
case $env in "~/"*) env=$HOME/${env#"~/"} ;; esac
is_ours() { [ "$("$1" --version 2>/dev/null)" = "toolkit %(version)s" ]; }
if [ -z "$env" ]; then
    found=$(command -v toolkit || true)
    if [ -n "$found" ] && is_ours "$found"; then echo; echo "%(token)s $found"; exit; fi
    env=$HOME/.local/share/toolkit/%(version)s  # runs keep the environment that they began in
    for other in "${env%%/*}"/*; do
        [ "$other" = "$env" ] || [ ! -x "$other/bin/toolkit" ] ||
            echo "$other holds another version; when no run there uses it, remove it: rm -r '$other'" >&2
    done
fi
if [ ! -x "$env/bin/python" ]; then
    for python in python3.13 python3.12 python3.11 python3 ""; do
        $python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if [ -z "$python" ]; then
        echo "no Python 3.11 or newer with venv is on PATH at a login there; make an environment there," >&2
        echo "or load a module in your profile, and name it: toolkit site init --on LOGIN --env FOLDER" >&2
        exit 2
    fi
    $python -m venv "$env"
fi
if [ %(force)s = 1 ] || ! is_ours "$env/bin/toolkit"; then
    echo "installing the toolkit in $env; where torch is missing this takes minutes" >&2
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    base64 -d > "$folder/%(name)s" <<'END'
%(wheel)sEND
    pip() { "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }
    pip "$folder/%(name)s[web]"
    pip --no-deps --force-reinstall "$folder/%(name)s"
fi
echo
echo "%(token)s $env/bin/toolkit"
"""
