"""open TensorBoard on runs"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.errors import RequestError

if TYPE_CHECKING:
    from toolkit.files.rundir import RunDir

#: TensorBoard reads a thousand runs for 17 s and keeps a core busy after that.
MOST_RUNS = 100

#: Names of this machine that only itself can use.
_HERE = ("localhost", "127.0.0.1", "::1")
#: Addresses that stand for all networks of this machine.
_EVERYWHERE = ("0.0.0.0", "::")

EXAMPLES = (
    ("toolkit tensorboard", "the newest runs"),
    ("toolkit tensorboard gpt digits-ddp --port 6007", "two runs, at another port"),
    ("toolkit tensorboard --host $(hostname)", "on a compute node: what to type on your own machine is printed"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help=f"default: the newest {MOST_RUNS}")
    parser.add_argument("--port", type=int, default=6006)
    host = "the address to serve at; default: this machine only"
    parser.add_argument("--host", default="localhost", help=host)


def run(args: Namespace) -> None:
    """Replace this process by TensorBoard, so that Ctrl-C reaches it directly."""
    from toolkit.base import terminal
    from toolkit.cli import selection
    from toolkit.files import rundir

    runs = selection.named(args.run)[0] if args.run else rundir.all_runs()
    if not runs:
        raise RequestError(f"there are no runs under {rundir.runs_root()}")
    if not args.run and len(runs) > MOST_RUNS:
        terminal.say(f"the newest {MOST_RUNS} of {len(runs)} runs; name others to see them", sys.stderr)
        runs = runs[-MOST_RUNS:]
    if args.host not in _HERE or "SSH_CONNECTION" in os.environ:
        terminal.say(
            f"from your own machine: `{tunnel_command(args.host, args.port)}`, then open http://localhost:{args.port}",
            sys.stderr,
        )
    argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", os.fspath(_links(runs))]
    os.execv(argv[0], [*argv, "--port", str(args.port), "--host", args.host])


def tunnel_command(host: str, port: int) -> str:
    """Return the command that makes ``port`` of ``host`` reachable from the user's own machine, by its login node."""
    # SSH_CONNECTION holds the addresses and ports of both ends, ssh(1): the third word is this machine's. In a job it
    # is of the shell that has submitted it.
    words = os.environ.get("SSH_CONNECTION", "").split()
    login = words[2] if len(words) == 4 else os.environ.get("SLURM_SUBMIT_HOST") or socket.gethostname()
    user = f"{os.environ['USER']}@" if os.environ.get("USER") else ""
    target, end = shlex.quote(f"{user}{login}"), f"[{host}]" if ":" in host else host
    if host in _EVERYWHERE:
        end = "localhost"
    if "SLURM_JOB_ID" in os.environ and host in _EVERYWHERE:
        end = socket.gethostname()
    elif "SLURM_JOB_ID" in os.environ and host in _HERE:  # only the node itself can reach it
        target = f"-J {target} {shlex.quote(f'{user}{socket.gethostname()}')}"
    return f"ssh -N -L {port}:{end}:{port} {target}"


def _links(runs: Sequence[RunDir]) -> Path:
    """Return a folder that links ``NAME/ID`` to the curves of each run. TensorBoard names the runs by it.

    The same runs have the same folder, in the user's cache.
    """
    import hashlib
    import tempfile

    from toolkit.base import fsio
    from toolkit.base.trust import cache_dir

    paths = "\n".join(os.fspath(run.tensorboard) for run in runs)
    cache = cache_dir()
    if cache is None:
        folder = Path(tempfile.mkdtemp(prefix="toolkit-tensorboard-"))
    else:
        folder = cache / "tensorboard" / hashlib.sha256(os.fsencode(paths)).hexdigest()[:16]
    for run in runs:
        link = fsio.make_dir(folder / run.name) / run.id
        if not link.is_symlink():
            link.symlink_to(run.tensorboard)
    return folder
