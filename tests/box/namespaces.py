"""Machines made of namespaces: each has its own processes, host name, mounts and network.

A machine is the PID namespace of its init process. Ending that init ends every process of the machine, whatever it
forked or double-forked, and with the last process the kernel takes back its mounts and its network: a machine leaves
nothing behind, and nothing of it is ever visible among the mounts and the links of the host.
"""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.box.errors import BoxError
from tests.box.roots import USER, USER_ID
from tests.waiting import PATIENCE

T = TypeVar("T")
CGROUPS = Path("/sys/fs/cgroup")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TCP_LISTEN = "0A"  # as /proc/net/tcp writes it
BOX_MARK, NODE_MARK = "TOOLKIT_BOX_DIR", "TOOLKIT_BOX_NODE"  # in the environment of each init, to find it again by


@dataclass(frozen=True)
class Layout:
    """What a machine is made of. `binds` maps paths of the machine to the paths of the host that appear there."""

    root: Path
    box_dir: Path
    binds: Mapping[Path, Path]
    files: Mapping[str, str]  # small files of its own, such as /etc/hosts
    folders: Sequence[str] = ()  # folders that must exist, such as /run/munge
    cgroups: Mapping[str, Path] | None = None  # controller -> folder of the host that the machine sees as its root


class BoxProcess(subprocess.Popen[str]):
    """A program in a machine. Signals go to the program, not to the nsenter that waits for it and relays its status."""

    @property
    def inner_pid(self) -> int:
        """The program's pid as the host sees it.

        The program leads a process group of its own, so that killpg works on it. ProcessLookupError when it has ended.
        """
        wait_for(lambda: self._leader() or self.poll() is not None, 5, f"{self.args!r} to start")
        if (leader := self._leader()) is None:
            raise ProcessLookupError(f"{self.args!r} has ended")
        return leader

    def _leader(self) -> int | None:
        """nsenter's child, from the moment that setsid has made it the leader of its group."""
        with contextlib.suppress(ProcessLookupError):
            return next((pid for pid in _children(self.pid) if os.getpgid(pid) == pid), None)
        return None

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.inner_pid, sig)

    def kill_group(self) -> None:
        """SIGKILL to the program and to what it started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.inner_pid, signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Machine:
    """One running machine, known by the pid its init has on the host."""

    def __init__(self, name: str, layout: Layout):
        self.name = name
        self._log_path = layout.box_dir / "log" / f"{name}.init.log"
        self._unshare = _start_init(name, layout, self._log_path)
        self._pid = 0

    @property
    def pid(self) -> int:
        """The init's pid on the host. The first use waits until the machine stands: mounts made, root entered."""
        if not self._pid:
            assert self._unshare.stdout is not None
            if self._unshare.stdout.readline() != "ready\n":
                raise BoxError(f"machine {self.name} did not start:\n{tail(self._log_path)}")
            self._pid = next(iter(_children(self._unshare.pid)))
        return self._pid

    @property
    def is_alive(self) -> bool:
        return self._unshare.poll() is None

    def path(self, inside: str) -> Path:
        """Return the host's path of a path in the machine. Sockets and logs can be read there without a process."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def listens(self, port: int) -> bool:
        """Whether something in the machine accepts TCP connections there (IPv4), told without a connection."""
        fields = (line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:])
        return any(local.endswith(f":{port:04X}") and state == TCP_LISTEN for _, local, _, state, *_ in fields)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | str = "/",
        user: str | None = None,
        **streams: Any,
    ) -> BoxProcess:
        """Start `argv` here with exactly this environment, in text mode; `streams`: Popen's stdin, stdout, stderr."""
        command = enter_command(self.pid, argv, env=env, cwd=cwd, user=user)
        return BoxProcess(command, text=True, errors="replace", **streams)

    def pids(self) -> list[int]:
        """Return the host pids of all live processes in the machine, without its init. Empty when it is dead."""
        if not self.is_alive:
            return []
        space = _pid_namespace(self.pid)
        return [pid for pid in all_pids() if pid != self.pid and _pid_namespace(pid) == space and not _is_zombie(pid)]

    def kill(self) -> None:
        """End every process of the machine, as a power cut would. Wait until they are gone."""
        if self.is_alive:
            # Only the init: unshare outlives it, and its end then means that the kernel has ended everything in there.
            # Without an init yet, unshare.
            for pid in _children(self._unshare.pid) or [self._unshare.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._unshare.wait()
        self._unshare.stdout.close()


def enter_command(
    pid: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | str,
    user: str | None = None,
    own_session: bool = True,
) -> list[str]:
    """The host command that runs `argv` in the machine whose init is `pid`. `user` is root (None) or the plain user."""
    if user not in (None, "root", USER):
        raise BoxError(f"no user {user!r} in the box; there are root and {USER}")
    identity = [f"--setuid={USER_ID}", f"--setgid={USER_ID}"] if user == USER else []
    session = ["setsid"] if own_session else []
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
    variables = [f"{name}={value}" for name, value in env.items()]
    # env, not nsenter, changes the folder (older nsenters can't) and looks argv[0] up in the new PATH
    return [
        "nsenter",
        f"--target={pid}",
        *spaces,
        *identity,
        "--",
        "env",
        "-i",
        "--default-signal",  # started by `nohup make test &`, a program would ignore SIGINT for good
        f"--chdir={cwd}",
        *variables,
        *session,
        *argv,
    ]


def find_inits(box_dir: Path) -> dict[str, int]:
    """Return the pids of all inits of this box, by node name. They may be the remains of a crashed owner."""
    found = {}
    for pid in all_pids():
        environ = _environ(pid)
        if environ.get(BOX_MARK) == str(box_dir) and _is_init(pid):
            found[environ.get(NODE_MARK, "")] = pid
    return found


def make_cgroups(box_name: str, node: str, controllers: Sequence[str]) -> dict[str, Path]:
    """Make a cgroup per controller (v1) for a machine. Nodes of the same name in two boxes must not share one."""
    made = {}
    for controller in controllers:
        parent = CGROUPS / controller
        for part in (box_name, node):
            folder = parent / part
            folder.mkdir(exist_ok=True)
            if controller == "cpuset":  # empty in a new cpuset, and then no task can enter it
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((parent / file).read_text())
            parent = folder
        made[controller] = parent
    return made


def remove_cgroups(box_name: str) -> None:
    """Remove what make_cgroups and Slurm made. The processes must have ended; the kernel needs a moment after that."""
    for top in CGROUPS.glob(f"*/{box_name}"):
        for folder, _, _ in os.walk(top, topdown=False):
            wait_for(functools.partial(_rmdir, Path(folder)), 5, f"cgroup {folder} to become empty")


def wait_for(condition: Callable[[], T | None], timeout_s: float, what: str, pause_s: float = 0.02) -> T:
    """The first true value of `condition`; BoxError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + PATIENCE * timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise BoxError(f"waited {PATIENCE * timeout_s:g} s for {what}, in vain")
        time.sleep(pause_s)
    return value


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, or that there is none."""
    if not path.exists():
        return f"({path} does not exist)"
    return "\n".join([f"{path}:", *path.read_text(errors="replace").splitlines()[-lines:]])


def all_pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _start_init(name: str, layout: Layout, log_path: Path) -> subprocess.Popen[str]:
    # setpriv and --kill-child: when the owner dies, even by SIGKILL, so does the init and with it the whole machine.
    # The kernel sends that signal when the *thread* that started us ends: see Box._boot.
    argv = [
        "setpriv",
        "--pdeathsig=KILL",
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "/bin/sh",
        "-euc",
        _init_script(name, layout),
    ]
    environment = {"PATH": SYSTEM_PATH, BOX_MARK: str(layout.box_dir), NODE_MARK: name}
    with log_path.open("w") as log:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd="/",
            start_new_session=True,
        )


def _init_script(name: str, layout: Layout) -> str:
    """Shell that turns fresh namespaces into the machine and stays as its init, reaping orphans."""
    stage = layout.box_dir / "stage"
    lines = [
        f"hostname {name}",
        # a tmpfs that only this mount namespace sees: what the machine writes to its own root dies with it
        f"mount -t tmpfs -o mode=0755 tmpfs {_q(stage)}",
        f"cd {_q(stage)} && mkdir upper work root",
        f"mount -t overlay -o lowerdir={_q(layout.root)},upperdir=upper,workdir=work overlay root",
        "cd root && mount -t proc proc proc && mount -t sysfs sysfs sys",
        *_cgroup_lines(layout.cgroups),
        *_device_lines(),
        "mount -t tmpfs -o mode=1777 tmpfs tmp && mount -t tmpfs -o mode=0755 tmpfs run",
        *(f"mkdir -p .{_q(folder)}" for folder in layout.folders),
        *(f"printf %s {_q(text)} >.{_q(path)}" for path, text in layout.files.items()),
        *(line for inside in sorted(layout.binds) for line in _bind_lines(layout.binds[inside], inside)),
        "chroot . ldconfig",  # for a Python in /usr/local, whose libpython is found by the loader's cache only
        "pivot_root . mnt",
        # bash reaps what orphans leave; reading from a fifo that it holds open for writing as well never ends
        "exec chroot . /bin/bash -c "
        + _q(
            "cd / && umount -l /mnt && mkfifo -m 0600 /run/init && exec 0<>/run/init && "
            "echo ready && exec >&- && while :; do read -r; done"
        ),
    ]
    return "\n".join(lines)


def _cgroup_lines(cgroups: Mapping[str, Path] | None) -> list[str]:
    lines = ["mount -t tmpfs -o mode=0755 tmpfs sys/fs/cgroup"]
    for controller, folder in (cgroups or {}).items():
        lines.append(f"mkdir sys/fs/cgroup/{controller} && mount --bind {_q(folder)} sys/fs/cgroup/{controller}")
    return lines


def _device_lines() -> list[str]:
    devices = "null zero full random urandom tty"
    return [
        "mount -t tmpfs -o mode=0755 tmpfs dev && mkdir dev/pts dev/shm",
        f"for device in {devices}; do : >dev/$device; mount --bind /dev/$device dev/$device; done",
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts && ln -s pts/ptmx dev/ptmx",
        "mount -t tmpfs -o mode=1777 tmpfs dev/shm",
        "ln -s /proc/self/fd dev/fd && ln -s fd/0 dev/stdin && ln -s fd/1 dev/stdout && ln -s fd/2 dev/stderr",
    ]


def _bind_lines(source: Path, inside: Path) -> list[str]:
    target = _q(f".{inside}")
    make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {_q(f'.{inside.parent}')} && : >>{target}"
    return [make, f"mount --bind {_q(source)} {target}"]


def _q(value: object) -> str:
    return shlex.quote(str(value))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _pid_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _status(pid: int, field: str) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(f"{field}:")), [])


def _is_zombie(pid: int) -> bool:
    return _status(pid, "State")[:1] in ([], ["Z"], ["X"])


def _is_init(pid: int) -> bool:
    own_pids = _status(pid, "NSpid")
    return len(own_pids) > 1 and own_pids[-1] == "1"


def _environ(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
