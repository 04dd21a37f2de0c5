"""`python -m tests.box shell|up|enter|down`: a Slurm cluster to work on by hand."""

import argparse
import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.box import Box, BoxError, state
from tests.box.cluster import PROJECT
from tests.box.config import LOGIN
from tests.box.namespaces import enter_command, find_inits, wait_for
from tests.box.roots import RELEASES

READY = "ready"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except BoxError as error:
        print(f"box: {error}", file=sys.stderr)
        return 1


def shell(options: argparse.Namespace) -> int:
    """Run a shell on the login side of a new box. The box ends with the shell."""
    with _box(options) as box:
        _say(f"{options.nodes} nodes of Slurm {options.slurm}; sinfo, srun, sbatch work here, exit takes it down")
        _say(f"of this machine's folders the box has {PROJECT} alone: what you want to keep belongs there")
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for what runs in the shell
        return subprocess.run(_shell_command(box.box_dir.name)).returncode


def up(options: argparse.Namespace) -> int:
    """Leave a box running, owned by a process of its own that `down` ends."""
    size = [f"--{name}={value}" for name in ("nodes", "cpus", "profile", "slurm") if (value := getattr(options, name))]
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.box", "hold", *size],
        cwd=PROJECT,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    word, _, name = keeper.stdout.readline().strip().partition(" ")
    if word != READY:
        return keeper.wait() or 1  # it has said why on stderr
    _say(f"{name} is up; enter it with `python -m tests.box enter {name}`, end it with `python -m tests.box down`")
    return 0


def hold(options: argparse.Namespace) -> int:
    """Own a box until SIGTERM. `up` starts this process and leaves it behind."""
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    with _box(options) as box:
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # after up: the box's programs would inherit the mask
        (box.box_dir / "detached").touch()
        print(READY, box.box_dir.name, flush=True)
        signal.sigwait(ends)
    return 0


def enter(options: argparse.Namespace) -> int:
    """Open a shell on the login side of a running box. Without a name, there must be only one that `up` left."""
    names = [options.name] if options.name else [name for name in state.owned() if _is_detached(name)]
    if len(names) != 1:
        raise BoxError(f"which box? {', '.join(names) or '`up` left none'}")
    return subprocess.run(_shell_command(names[0])).returncode


def down(options: argparse.Namespace) -> int:
    """End the boxes that `up` left and the remains of crashed owners. With --all, also end those of running tests."""
    for name, pid in state.owned().items():
        if not options.all and not _is_detached(name):
            _say(f"{name} belongs to running process {pid}: left alone (--all ends it)")
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        wait_for(functools.partial(_is_gone, name), 15, f"the owner of {name} (pid {pid}) to end")
        _say(f"{name} is down")
    for name in state.sweep():
        _say(f"{name} is swept away")
    return 0


def _is_detached(name: str) -> bool:
    """True if `up` left this box (see hold). Otherwise a test or a shell is using it."""
    return (state.boxes_dir() / name / "detached").exists()


def _is_gone(name: str) -> bool:
    return name not in state.owned()


def _shell_command(name: str) -> list[str]:
    login = find_inits(state.boxes_dir() / name).get(LOGIN)
    if login is None:
        raise BoxError(f"no box {name!r} is up; up are: {', '.join(state.owned()) or 'none'}")
    environment = Box.environment() | {"TERM": os.environ.get("TERM", "dumb"), "PS1": rf"[{name} \u@\h \W]\$ "}
    return enter_command(login, ["bash", "--norc", "-i"], env=environment, cwd=PROJECT, own_session=False)


def _box(options: argparse.Namespace) -> Box:
    return Box(options.nodes, options.cpus, options.profile, options.slurm)


def _say(message: str) -> None:
    print(f"box: {message}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.box", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (shell, up, hold):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.add_argument("--nodes", type=int, default=4)
        command.add_argument("--cpus", type=int, help="what Slurm believes each node has (4; strict: what there is)")
        command.add_argument("--profile", choices=["plain", "strict"], default="plain")
        command.add_argument("--slurm", choices=list(RELEASES), default="22.05")
        command.set_defaults(command=function)
    command = commands.add_parser("enter", help=enter.__doc__)
    command.add_argument("name", nargs="?")
    command.set_defaults(command=enter)
    command = commands.add_parser("down", help=down.__doc__)
    command.add_argument("--all", action="store_true", help="boxes of running tests and shells too")
    command.set_defaults(command=down)
    return parser


if __name__ == "__main__":
    sys.exit(main())
