"""A login node: a real sshd on this machine's loopback, whose user has another home and another environment."""

import os
import pwd
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.wheel import made

#: What the user's shell prints at a login. Without a newline at its end, as some do.
BANNER = "Welcome! *** 3 jobs {of} yours ***"

#: Runs its arguments, and lets 32 KiB a second through in each direction, each piece 0.1 s late.
SLOW = """
import os, subprocess, sys, threading, time
with subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
    def pass_on(source, sink):
        while piece := os.read(source, 3277):
            time.sleep(0.1)
            os.write(sink, piece)
        os.close(sink)
    threading.Thread(target=pass_on, args=[0, process.stdin.fileno()], daemon=True).start()
    pass_on(process.stdout.fileno(), 1)
"""


class LoginNode:
    """Runs `toolkit` on a laptop that reaches the login node as ``login``."""

    has_own_ports = True  #: of the loopback, other ones than the laptop's

    def __init__(self, folder: Path, home: Path, user: str, environ: dict[str, str]) -> None:
        self.folder, self.home, self.user = folder, home, user
        self.environ = environ
        self.project = folder / "my project"
        self.project.mkdir()

    def popen(self, *words: str) -> "subprocess.Popen[str]":
        command, pipe = [sys.executable, "-m", "toolkit", *words], subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.project, env=self.environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        """Return the output of a command that ends with an exit code; its errors after them where that is not 0."""
        with self.popen(*words) as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == code, out + err
        return out + err if code else out

    def hang_up(self) -> None:
        """End the shared connections."""
        for shared in Path(self.environ["XDG_CACHE_HOME"]).glob("*/????????????????????????????????????????"):
            subprocess.run(["ssh", "-S", str(shared), "-O", "exit", "login"], capture_output=True, check=False)

    @contextmanager
    def ssh_config(self, *lines: str, is_slow: bool = False) -> Iterator[None]:
        """Add lines to ssh's config of this login node, or slow its line down."""
        config = self.folder / "ssh_config"
        before = config.read_text()
        text = before.replace("Host login\n", "\n  ".join(["Host login", *lines, ""]), 1)
        if is_slow:
            (self.folder / "slow.py").write_text(SLOW)
            slow = shlex.join([sys.executable, f"{self.folder}/slow.py"])
            text = text.replace("ProxyCommand ", f"ProxyCommand {slow} ", 1)
        config.write_text(text)
        try:
            yield
        finally:
            config.write_text(before)

    @property
    def there(self) -> Path:
        """Return the project's folder on the login node."""
        (found,) = (self.home / "toolkit").glob("my-project-*")
        return found


@contextmanager
def login_node(folder: Path) -> Iterator[LoginNode]:
    """Yield a login node with an sshd. Skip where there is none."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without
    with ExitStack() as stack:
        user, home = stack.enter_context(_user(folder))
        inside = stack.enter_context(_network())
        # A connection has an sshd of its own, as of inetd, in the network of the login node.
        node = stack.enter_context(laptop(folder, folder, user, home, [*inside, sshd]))
        node.has_own_ports = bool(inside)
        yield node


@contextmanager
def laptop(folder: Path, etc: Path, user: str, home: Path, sshd: Sequence[str]) -> Iterator[LoginNode]:
    """Yield a login node that starts the words ``sshd`` for each connection. It sees its files in ``etc``."""
    for name in (etc / "host", folder / "mine"):
        made("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(name))
    (etc / "keys").write_text((folder / "mine.pub").read_text())
    (etc / "keys").chmod(0o644)
    (etc / "sshd_config").write_text(
        f'HostKey "{etc}/host"\nAuthorizedKeysFile "{etc}/keys"\nPermitRootLogin yes\n'
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"Host login\n  ProxyCommand {shlex.join([*sshd, '-i', '-f', f'{etc}/sshd_config', '-E', f'{etc}/sshd.log'])}\n"
        f"  User {user}\n  IdentityFile {folder}/mine\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
        "Host gone\n  HostName 127.0.0.1\n  Port 1\n"
    )
    # ssh looks for its config in the home of the password file, whatever HOME says.
    programs, own_home = folder / "programs", folder / "laptop"
    programs.mkdir()
    own_home.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (programs / "ssh").chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLKIT", "PYTHON", "SLURM"))}
    environ |= {"HOME": str(own_home), "PATH": f"{programs}:{os.environ['PATH']}"}
    environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir="/tmp")  # short, for sockets
    node = LoginNode(folder, home, user, environ)
    try:
        yield node
    finally:
        node.hang_up()
        shutil.rmtree(environ["XDG_CACHE_HOME"])


@contextmanager
def _network() -> Iterator[list[str]]:
    """Yield the words before a command that runs it where the ports of the loopback are other ones. None: not here."""
    script = "ip link set lo up && echo up && exec sleep infinity"
    with subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            is_up = holder.stdout.readline() == b"up\n"
            yield ["nsenter", f"--target={holder.pid}", "--net"] if is_up else []
        finally:
            holder.kill()


@contextmanager
def _user(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a user of the login node and their home: another one than the test's where it is root."""
    if os.geteuid() != 0:
        user = pwd.getpwuid(os.geteuid())
        yield user.pw_name, Path(user.pw_dir)
        return
    name, home = f"toolkit-{secrets.token_hex(4)}", folder / "home of another"
    for each in (folder, *folder.parents):  # pytest's folders are root's alone
        if each.stat().st_mode & 0o055 != 0o055:
            each.chmod(each.stat().st_mode | 0o055)
    python = Path(sys.executable).resolve()
    is_reachable = all(each.stat().st_mode & 0o005 == 0o005 for each in (python, *python.parents))
    same = [] if is_reachable else ["--non-unique", "--uid", "0"]  # root by another name: this Python is root's alone
    made("useradd", *same, "--create-home", "--home-dir", str(home), "--shell", "/bin/bash", "--password", "*", name)
    (home / ".bash_profile").write_text(f"printf %s {shlex.quote(BANNER)}\nexport PATH=$PATH\n")
    (home / ".bashrc").write_text("echo hello from bashrc\n")
    try:
        yield name, home
    finally:
        made("userdel", "--force", name)


def make_environment(folder: Path) -> None:
    """Make an environment with pip and what the toolkit needs, but without the toolkit."""
    made(sys.executable, "-m", "venv", str(folder))
    made(str(folder / "bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")  # there is a newer one
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
