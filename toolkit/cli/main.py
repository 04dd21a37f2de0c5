"""The parser, and one short function for each command.

Answers go to stdout, logs and errors to stderr. Exit codes: 0 done, 1 the job failed, 2 the request was wrong,
75 stopped cleanly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from toolkit import __version__
from toolkit.errors import EXIT_DONE, EXIT_FAILED, RequestError, ToolkitError

EPILOG = """A RUN is a run id, a unique prefix of one, a config's name (its newest run), or a path.
Exit codes: 0 done, 1 the job failed, 2 the request was wrong, 75 stopped cleanly, to be continued."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parse(_parser(), argv)
    try:
        code: int = args.command(args)
        return code
    except ToolkitError as error:
        print(f"toolkit: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `toolkit logs ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse gives up on ``CONFIG --wait key=value``: what it left over are overrides if they look like it."""
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolkit",
        description="Distributed PyTorch jobs on Slurm.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"toolkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    submit = _add(commands, "submit", _submit, "submit a run to Slurm, or start it on this machine")
    _takes_config(submit)
    submit.add_argument("--executor", default="auto", help="auto (default), slurm, local, debug (one rank, right here)")
    submit.add_argument("--dry-run", action="store_true", help="print the sbatch script and config, submit nothing")
    submit.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
    submit.add_argument("--follow", action="store_true", help="wait, and show the progress meanwhile")

    supervise = _add(commands, "supervise", _supervise, "run the whole lifecycle inside an sbatch or salloc allocation")
    _takes_config(supervise)

    run = _add(commands, "run", _run, "be one rank, under srun, torchrun, mpirun or alone")
    _takes_config(run)

    status = _add(commands, "status", _status, "how runs stand, by their own files first and Slurm second")
    status.add_argument("run", nargs="*", metavar="RUN", help="default: the ten newest runs")
    status.add_argument("--json", action="store_true", help="one JSON document")

    show_logs = _add(commands, "logs", _logs, "the log of a rank, or of the supervisor")
    show_logs.add_argument("run", metavar="RUN")
    show_logs.add_argument("--rank", type=int, help="default: the supervisor's log")
    show_logs.add_argument("--attempt", type=int, help="default: the newest")
    show_logs.add_argument("--follow", action="store_true", help="print what is added until the run has ended")

    for name, command, text in (
        ("cancel", _cancel, "end a run for good; its checkpoints stay"),
        ("resume", _resume, "submit an ended run again, from its last checkpoint"),
    ):
        sub = _add(commands, name, command, text)
        sub.add_argument("run", metavar="RUN")
        if name == "resume":
            sub.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
            sub.add_argument("--follow", action="store_true", help="wait, and show the progress meanwhile")

    env = _add(commands, "env", _env, "the placement that this process derives, and from what")
    env.add_argument("--json", action="store_true", help="one JSON document")

    data = _add(commands, "data", _data_fetch, "data sets: `toolkit data fetch NAME`, on the login node")
    data.add_argument("verb", choices=["fetch"])
    data.add_argument("name", metavar="NAME")
    data.add_argument("--root", help="default: $TOOLKIT_DATA, or ./data")

    board = _add(commands, "tensorboard", _tensorboard, "open TensorBoard on runs")
    board.add_argument("run", nargs="*", metavar="RUN", help="default: all runs")
    board.add_argument("--port", type=int, default=6006)
    return parser


def _add(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    return sub


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optim.lr=0.1")


def _submit(args: argparse.Namespace) -> int:
    from toolkit.launch import submit

    if args.dry_run:
        print(submit.dry_run(args.config, args.overrides, executor=args.executor))
        return EXIT_DONE
    return _see_through(submit.submit(args.config, args.overrides, executor=args.executor), args)


def _resume(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.launch import submit

    return _see_through(submit.resume(rundir.find(args.run)), args)


def _see_through(run: Any, args: argparse.Namespace) -> int:
    from toolkit.cli import follow

    follow.announce(run)
    return follow.to_the_end(run, bar=args.follow) if args.wait or args.follow else EXIT_DONE


def _supervise(args: argparse.Namespace) -> int:
    from toolkit.launch import door

    door.supervise(args.config, args.overrides)
    return EXIT_DONE


def _run(args: argparse.Namespace) -> int:
    from toolkit.launch.rank import run_rank

    return run_rank(args.config, args.overrides)


def _status(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import show

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()[-10:]
    rows = show.status_rows(runs)
    print(json.dumps(rows, indent=2) if args.json else show.status_table(rows))
    return EXIT_DONE


def _logs(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import show

    show.logs(rundir.find(args.run), rank=args.rank, attempt=args.attempt, follow=args.follow)
    return EXIT_DONE


def _cancel(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.launch.submit import attach

    run = rundir.find(args.run)
    if run.result() is not None:
        print(f"run {run.id} has already ended: {(run.result() or {})['state']}")
        return EXIT_DONE
    attach(run).cancel()
    print(f"run {run.id}: cancelled; its checkpoints stay, `toolkit resume {run.id}` goes on from the last one")
    return EXIT_DONE


def _env(args: argparse.Namespace) -> int:
    from toolkit.cli import show

    facts = show.environment_facts()
    print(json.dumps(facts, indent=2) if args.json else show.environment_table(facts))
    return EXIT_DONE


def _data_fetch(args: argparse.Namespace) -> int:
    from toolkit.data.datasets import fetch

    print(fetch(args.name, args.root))
    return EXIT_DONE


def _tensorboard(args: argparse.Namespace) -> int:
    """Replaces this process, so that Ctrl-C reaches TensorBoard itself."""
    from toolkit import rundir

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()
    if not runs:
        raise RequestError(f"there are no runs under {rundir.runs_root()}")
    folders = ",".join(f"{run.name}/{run.id}:{run.tensorboard}" for run in runs)
    where = ["--logdir", str(runs[0].tensorboard)] if len(runs) == 1 else ["--logdir_spec", folders]
    argv = [sys.executable, "-m", "tensorboard.main", *where, "--port", str(args.port)]
    os.execv(argv[0], argv)
    return EXIT_FAILED
