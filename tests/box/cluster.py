"""`Box`: a Slurm cluster that tests start, use and stop. They can break it in the ways that clusters break."""

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from tests.box import state
from tests.box.config import GPU_TYPE, LOGIN, Spec, config_files, hosts
from tests.box.errors import BoxError, BoxUnavailable
from tests.box.namespaces import CGROUPS, SYSTEM_PATH, BoxProcess, Layout, Machine, make_cgroups, tail, wait_for
from tests.box.roots import ensure_root
from tests.waiting import PATIENCE

PROJECT = Path(__file__).resolve().parents[2]
DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmdbd", "mariadbd"}
FOLDERS = ("/run/munge", "/run/pmix", "/run/mysqld", "/var/spool/slurmctld", "/var/spool/slurmd")
CONTROLLERS = ("cpuset", "memory", "freezer", "cpuacct", "devices")
SLURMD_PORT = 6818
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}
MUNGED = shlex.split(
    "munged --foreground --force --key-file=/etc/slurm/munge.key --pid-file=/run/munge/munged.pid"
    " --seed-file=/run/munge/munged.seed --log-file=/run/munge/munged.log"
)
# Durability and passwords are for databases that outlive their machine and can be reached from another
MARIADB = shlex.split(
    "mariadbd --no-defaults --user=root --datadir=/var/lib/mysql --socket=/run/mysqld/mysqld.sock"
    " --pid-file=/run/mysqld/mysqld.pid --skip-networking --skip-grant-tables --skip-log-bin --performance-schema=OFF"
    " --innodb-flush-log-at-trx-commit=0 --innodb-log-file-size=4M --innodb-buffer-pool-size=32M"
)


class Box:
    """A Slurm cluster of this machine, with `nodes` compute nodes and a login side.

    `cpus` is the number that Slurm believes each node has; all share the machine's cores. `profile` strict has the
    limits of strict sites (see config.py). `shared` are more folders that all nodes see, at their path on the host.
    `grace_s` is the GraceTime of the low partition. `gpus` is the number of each node's GPUs, which are counted and do
    not exist; `gpu_types`, `gpu_shares` and `topology` are those of config.py. The cluster ends with the process that
    made it, even by SIGKILL.
    """

    def __init__(
        self,
        nodes: int = 4,
        cpus: int | None = None,
        profile: Literal["plain", "strict"] = "plain",
        slurm: str = "22.05",
        shared: Sequence[Path | str] = (),
        name: str | None = None,
        grace_s: int = 30,
        slurmd_timeout_s: int = 30,
        gpus: Sequence[int] = (),
        gpu_types: Sequence[str] = (GPU_TYPE,),
        gpu_shares: Mapping[str, int] | None = None,
        topology: str = "",
    ):
        strict = profile == "strict"
        # strict binds tasks to cores, and can't bind to cores that aren't there
        cpus = cpus or (os.cpu_count() or 1 if strict else 4)
        name = name or f"box{secrets.token_hex(3)}"  # also the cluster's name, so that no two runs have the same
        self.spec = Spec(
            name,
            nodes,
            cpus,
            strict,
            slurm,
            grace_s,
            slurmd_timeout_s,
            gpus,
            gpu_types,
            gpu_shares or {},
            topology,
        )
        self.box_dir = state.boxes_dir() / name
        self.shared = self.box_dir / "shared"
        self._more_shared = [Path(path).absolute() for path in shared]
        self._machines: dict[str, Machine] = {}
        self._daemons: dict[tuple[str, str], BoxProcess] = {}
        self._owner: TextIO | None = None
        self._starter = ThreadPoolExecutor(1)  #: its thread lives as long as we do, and so do the machines it starts

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # -- life ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Bring the cluster up and return when all its nodes are idle. BoxUnavailable where this machine can't."""
        self._root = ensure_root(self.spec.slurm)
        if self.spec.strict and not (CGROUPS / "freezer").is_dir():
            raise BoxUnavailable("the strict profile needs cgroup v1 controllers in /sys/fs/cgroup")
        state.sweep()
        _, self._owner = state.claim(self.spec.name)
        try:
            self._write_files()
            self._start_machines()
            self._check_python()
            self._start_cluster()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the box and remove all that it made. Harmless when the box is not up."""
        for machine in self._machines.values():
            machine.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        self._machines.clear()
        self._daemons.clear()
        if self._owner is not None:
            state.release(self.box_dir, self._owner)
            self._owner = None

    # -- programs -----------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
        input: str | None = None,
        node: str = LOGIN,
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a machine of the box, to its end. BoxError with its output where `check` fails.

        `env` is added to a small, fixed environment; nothing is inherited. `cwd` is the project by default. After
        `timeout` seconds, and more on a busy machine, the program and its process group are killed and TimeoutExpired
        is raised.
        """
        streams = {
            "stdin": subprocess.PIPE if input is not None else subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        with self.popen(argv, cwd, env, node, user, **streams) as process:
            try:
                out, err = process.communicate(input, timeout=PATIENCE * timeout)
            except BaseException:
                process.kill_group()
                raise
        if check and process.returncode != 0:
            raise BoxError(f"{shlex.join(argv)} on {node} returned {process.returncode}:\n{out[-3000:]}{err[-3000:]}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def popen(
        self,
        argv: Sequence[str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        node: str = LOGIN,
        user: str | None = None,
        **streams: Any,
    ) -> BoxProcess:
        """Start a program on a machine of the box. Signals to the result reach the program (see BoxProcess)."""
        environment = {**self.environment(user), **(env or {})}
        return self._machine(node).popen(argv, env=environment, cwd=cwd or PROJECT, user=user, **streams)

    @staticmethod
    def environment(user: str | None = None) -> dict[str, str]:
        """What every program of the box has in its environment."""
        user = user or "root"
        home = "/root" if user == "root" else f"/home/{user}"
        return {
            "PATH": f"{sys.prefix}/bin:{SYSTEM_PATH}",
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "SLURM_CONF": "/etc/slurm/slurm.conf",
        }

    def processes(self, node: str | None = None) -> list[tuple[int, str]]:
        """Return (host pid, command line) of live processes. Those are of one machine or of all, without daemons."""
        machines = [self._machine(node)] if node else list(self._machines.values())
        found = [(pid, *_names(pid)) for machine in machines for pid in machine.pids()]
        # one without a command line is just ending
        return [(pid, command) for pid, name, command in found if command and name not in DAEMONS]

    # -- Slurm --------------------------------------------------------------------------------------------------------

    def job(self, job_id: int | str) -> dict[str, str]:
        """The job's row of `scontrol show job`."""
        text = self.run(["scontrol", "--oneliner", "show", "job", str(job_id)]).stdout
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+?=|$)", text.splitlines()[0]))  # values may hold spaces

    def wait_job(self, job_id: int | str, timeout: float = 60) -> dict[str, str]:
        """Return the job's row once it is in a final state. A job that Slurm requeues is in none."""

        def finished() -> dict[str, str] | None:
            row = self.job(job_id)
            return row if row["JobState"] in FINISHED else None

        return wait_for(finished, timeout, f"job {job_id} to end", pause_s=0.2)

    def wait_idle(self, timeout: float = 30) -> None:
        """Wait until Slurm calls every node idle."""

        def idle() -> bool:
            listed = self.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"], check=False).stdout
            return listed.split() == ["idle"] * self.spec.nodes

        try:
            wait_for(idle, timeout, "all nodes to be idle", pause_s=0.1)
        except BoxError as error:
            raise BoxError(f"{error}\n{self._node_report()}") from error  # whose context is what went wrong before

    def revive(self) -> None:
        """Boot each node again that is not idle. A step that does not end would keep its node from all later jobs."""
        listed = self.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"], check=False).stdout
        for node, word in map(str.split, listed.splitlines()):
            if word != "idle":
                self.kill_node(node)
                self.start_node(node)
                self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        self.wait_idle()

    def restart_slurmctld(self) -> None:
        """End slurmctld and start it again with the state it saved."""
        self._stop_daemon(LOGIN, "slurmctld")
        self._start_slurmctld()

    def stop_slurmdbd(self) -> None:
        """Take accounting away: sacct fails until start_slurmdbd."""
        self._stop_daemon(LOGIN, "slurmdbd")

    def start_slurmdbd(self) -> None:
        self._start_daemon(LOGIN, "slurmdbd", ["slurmdbd", "-D"])
        self._wait_daemon(LOGIN, "slurmdbd", lambda: self._answers(["sacctmgr", "--noheader", "show", "cluster"]))

    # -- damage -------------------------------------------------------------------------------------------------------

    def kill_node(self, node: str) -> None:
        """Cut a node's power. The link goes first, so that the other side sees no connection close."""
        self.cut_node(node)
        self._machines.pop(node).kill()
        for key in [key for key in self._daemons if key[0] == node]:
            self._daemons.pop(key).wait()

    def start_node(self, node: str) -> None:
        """Boot a killed node and wait for its slurmd to listen. What Slurm makes of it is Slurm's (see wait_idle)."""
        self._boot(node)
        self._connect(node)
        self._start_node_daemons(node)
        self._wait_daemon(node, "slurmd", lambda: self._machine(node).listens(SLURMD_PORT))

    def cut_node(self, node: str) -> None:
        """Take the node off the network; what runs on it runs on."""
        self._ip(LOGIN, f"link set {node} down")

    def join_node(self, node: str) -> None:
        """Put a node back on the network. If Slurm calls it down, `resume` saves a wait of some two minutes."""
        self._ip(LOGIN, f"link set {node} up")
        self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)

    def slow_network(self, rate: str | None) -> None:
        """Limit the rate at which each node receives. `rate` is in tc's notation, such as 100mbit; None is no limit."""
        for node in self.spec.node_names:
            clear = ["tc", "qdisc", "del", "dev", node, "root"]
            self.run(clear, check=False)
            if rate is not None:
                self.run(
                    ["tc", "qdisc", "add", "dev", node, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
                )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for folder in ("etc", "log", "stage", "shared"):
            (self.box_dir / folder).mkdir()
        self.shared.chmod(0o1777)
        for name, text in config_files(self.spec).items():
            (self.box_dir / "etc" / name).write_text(text)
        (self.box_dir / "etc/munge.key").write_bytes(secrets.token_bytes(128))
        for secret in ("munge.key", "slurmdbd.conf"):  # munged and slurmdbd refuse to start when others can read
            (self.box_dir / "etc" / secret).chmod(0o600)

    def _layout(self, node: str) -> Layout:
        same_path = [PROJECT, *_python_paths(), self.shared, *self._more_shared]
        binds = {path: path for path in same_path}
        binds |= {Path("/etc/slurm"): self.box_dir / "etc", Path("/var/log/slurm"): self.box_dir / "log"}
        cgroups = make_cgroups(self.spec.name, node, CONTROLLERS) if self.spec.strict and node != LOGIN else None
        files = {"/etc/hosts": hosts(self.spec), "/etc/hostname": f"{node}\n", "/etc/resolv.conf": ""}
        return Layout(self._root, self.box_dir, binds, files, FOLDERS, cgroups)

    def _start_machines(self) -> None:
        for node in (LOGIN, *self.spec.node_names):  # each starts in the background: the first use waits for it
            self._boot(node)
        self._ip(
            LOGIN,
            "link add cluster type bridge",
            "link set lo up",
            f"addr add {self.spec.addresses[LOGIN]}/24 dev cluster",
            "link set cluster up",
        )
        for node in self.spec.node_names:
            self._connect(node)

    def _boot(self, node: str) -> None:
        """Start a machine, which would die with the thread that starts it (see namespaces.py)."""
        self._machines[node] = self._starter.submit(Machine, node, self._layout(node)).result()

    def _connect(self, node: str) -> None:
        """Lay a cable from the node to the bridge on the login side. Both ends are in the box's namespaces."""
        pid = self._machine(node).pid
        # sockets that a dead node never closed keep its network namespace, and the cable in it, for minutes
        self.run(["ip", "link", "delete", node], check=False)
        # the host's ip, in the login side's network but among the host's pids, can name the node's namespace
        cable = ["ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
        command = ["nsenter", f"--target={self._machine(LOGIN).pid}", "--net", *cable]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BoxError(f"{shlex.join(command)}: {done.stderr}")
        self._ip(LOGIN, f"link set {node} master cluster", f"link set {node} up")
        self._ip(node, "link set lo up", f"addr add {self.spec.addresses[node]}/24 dev eth0", "link set eth0 up")

    def _ip(self, node: str, *commands: str) -> None:
        self.run(["ip", "-batch", "-"], input="\n".join(commands) + "\n", node=node)

    def _check_python(self) -> None:
        done = self.run([sys.executable, "-c", "import ctypes, sqlite3, ssl"], check=False)
        if done.returncode != 0:
            raise BoxUnavailable(f"{sys.executable} of this machine does not run in {self._root}: {done.stderr[-500:]}")

    def _start_cluster(self) -> None:
        self._start_daemon(LOGIN, "mariadbd", MARIADB)
        self._start_daemon(LOGIN, "munged", MUNGED)
        self._wait_socket(LOGIN, "munged", "/run/munge/munge.socket.2")
        self._wait_socket(LOGIN, "mariadbd", "/run/mysqld/mysqld.sock")
        self.start_slurmdbd()
        self._start_slurmctld()
        for node in self.spec.node_names:
            self._start_node_daemons(node)
        self.wait_idle()

    def _start_slurmctld(self) -> None:
        self._start_daemon(LOGIN, "slurmctld", ["slurmctld", "-D"])
        self._wait_daemon(LOGIN, "slurmctld", lambda: self._answers(["scontrol", "ping"]))

    def _start_node_daemons(self, node: str) -> None:
        self._start_daemon(node, "munged", MUNGED)
        self._wait_socket(node, "munged", "/run/munge/munge.socket.2")
        self._start_daemon(node, "slurmd", ["slurmd", "-D"])

    def _start_daemon(self, node: str, name: str, argv: list[str]) -> None:
        with self._daemon_log(node, name).open("a") as log:
            self._daemons[node, name] = self.popen(
                argv, cwd="/", node=node, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _stop_daemon(self, node: str, name: str) -> None:
        daemon = self._daemons.pop((node, name))
        daemon.terminate()
        daemon.wait(timeout=30)

    def _wait_daemon(self, node: str, name: str, answers: Callable[[], bool]) -> None:
        """Wait until the daemon answers. Raise BoxError with the end of its log if it ends, or after 30 s."""
        daemon = self._daemons[node, name]
        try:
            wait_for(lambda: daemon.poll() is not None or answers(), 30, f"{name} on {node}", pause_s=0.05)
            if daemon.returncode is not None:
                raise BoxError(f"{name} on {node} ended with {daemon.returncode}")
        except BoxError as error:
            raise BoxError(f"{error}\n{tail(self._daemon_log(node, name))}") from None

    def _wait_socket(self, node: str, name: str, path: str) -> None:
        self._wait_daemon(node, name, self._machine(node).path(path).exists)

    def _answers(self, argv: list[str]) -> bool:
        return self.run(argv, check=False).returncode == 0

    def _daemon_log(self, node: str, name: str) -> Path:
        return self.box_dir / "log" / f"{node}.{name}.out"

    def _node_report(self) -> str:
        listing = [self.run(argv, check=False).stdout for argv in (["sinfo", "--Node", "--long"], ["squeue", "--long"])]
        logs = [tail(self._daemon_log(node, "slurmd"), 5) for node in self.spec.node_names]
        return "\n".join([*listing, *logs])

    def _machine(self, node: str) -> Machine:
        try:
            return self._machines[node]
        except KeyError:
            raise BoxError(f"no machine {node!r} is up; up are: {', '.join(self._machines) or 'none'}") from None


def _python_paths() -> list[Path]:
    """Return the folders of the virtual environment in use and of its base Python. Of /usr only Python's part."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    if base != Path("/usr"):
        return [prefix, base]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    parts = [base / part for part in (f"bin/{version}", "bin/python3", f"lib/{version}", "lib/python3")]
    return [path for path in (prefix, *parts) if path != base and path.exists()]


def _names(pid: int) -> tuple[str, str]:
    """(short name, command line) of a process; empty when it has just ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return Path(f"/proc/{pid}/comm").read_text().strip(), command
    except OSError:
        return "", ""
