"""The parser, and one short function for each command.

Answers go to stdout, logs and errors to stderr. Exit codes: 0 done, 1 the job failed, 2 the request was wrong,
75 stopped cleanly.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from toolkit import __version__, fsio
from toolkit.errors import EXIT_DONE, EXIT_FAILED, RequestError, ToolkitError

EPILOG = """A RUN is a run id, a unique prefix of one, a config's name (its newest run), or a path.
Exit codes: 0 done, 1 the job failed, 2 the request was wrong, 75 stopped cleanly, to be continued."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    _make_printable()
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
    except KeyboardInterrupt:  # `toolkit logs --follow` ends only so
        return EXIT_INTERRUPTED
    except OSError as error:
        if args.command in (_run, _supervise):  # a job's own error: its log needs the traceback
            raise
        print(f"toolkit: error: {_os_error_text(error)}", file=sys.stderr)
        return EXIT_FAILED


def _make_printable() -> None:
    """Print what the terminal's encoding lacks as escapes: the name of a file may hold any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


#: The exit code that a shell gives for SIGINT.
EXIT_INTERRUPTED = 130


def _os_error_text(error: OSError) -> str:
    """Return what the system refused, where, and what to do about the usual errors."""
    where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    advice = {
        errno.ENOSPC: "; make room, or choose another folder for runs: set TOOLKIT_RUNS",
        errno.EDQUOT: "; make room, or choose another folder for runs: set TOOLKIT_RUNS",
        errno.EACCES: "; if that is the folder for runs, choose another: set TOOLKIT_RUNS",
        errno.EROFS: "; if that is the folder for runs, choose another: set TOOLKIT_RUNS",
        errno.ENOTDIR: "; if that is the folder for runs, choose another: set TOOLKIT_RUNS",
    }.get(error.errno or 0, "")
    return f"{where or 'the current folder'}: {error.strerror or error}{advice}"


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, with overrides in any place.

    argparse gives up on ``CONFIG --wait key=value``: what it leaves over counts as overrides if it looks like them.
    The words after ``--`` are a command of the user's, with its own options.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Only exec takes a command of the user's.
    cut = words.index("--") if words[:1] == ["exec"] and "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:cut])
    args.words = words[cut + 1 :]
    # An unknown option is an error; other words are overrides.
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(text for text in rest if text.startswith('-')) or rest[0]}")
    if rest:
        args.overrides = [*args.overrides, *rest]
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

    # Starting runs.
    submit = _add(commands, "submit", _submit, "submit a run to Slurm, or start it on this machine")
    _takes_config(submit)
    submit.add_argument("--executor", default="auto", help="auto (default), slurm, local, debug (one rank, right here)")
    submit.add_argument("--dry-run", action="store_true", help="print the sbatch script and config, submit nothing")
    submit.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
    submit.add_argument("--follow", action="store_true", help="wait, and show the progress meanwhile")

    new = _add(commands, "new", _new, "make a project of your own from an example")
    new.add_argument("folder", metavar="NAME", help="its folder, which is made")
    new.add_argument(
        "--from",
        dest="example",
        default="classify",
        metavar="EXAMPLE",
        help="classify (default), language_model, loop, lightning, transformers, accelerate",
    )

    supervise = _add(commands, "supervise", _supervise, "run the whole lifecycle inside an sbatch or salloc allocation")
    _takes_config(supervise)

    run = _add(commands, "run", _run, "be one rank, under srun, torchrun, mpirun or alone")
    _takes_config(run)

    execute = _add(commands, "exec", _exec, "run any torchrun-style script as the ranks: toolkit exec ... -- CMD ...")
    execute.usage = "toolkit exec [--name NAME] [--executor E] [--wait] [--follow] [key=value ...] -- CMD ..."
    execute.add_argument("overrides", nargs="*", metavar="key=value", help="such as cluster.nodes=2")
    execute.add_argument("--name", help="of the run; default: the script's")
    execute.add_argument("--executor", default="auto", help="auto (default), slurm, local; inside a job: right here")
    execute.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
    execute.add_argument("--follow", action="store_true", help="wait, and show how it stands meanwhile")

    # Looking at runs.
    status = _add(commands, "status", _status, "how runs stand, by their own files first and Slurm second")
    status.add_argument("run", nargs="*", metavar="RUN", help="default: the ten newest runs")
    status.add_argument("--json", action="store_true", help="one JSON document")

    show_logs = _add(commands, "logs", _logs, "the log of a rank, or of the supervisor")
    show_logs.add_argument("run", metavar="RUN")
    show_logs.add_argument("--rank", type=int, help="default: the supervisor's log")
    show_logs.add_argument("--attempt", type=int, help="default: the newest")
    show_logs.add_argument("--follow", action="store_true", help="print what is added until the run has ended")

    why = _add(commands, "why", _why, "one page: cause, first failing rank, its traceback, what to do next")
    why.add_argument("run", metavar="RUN")
    why.add_argument("--json", action="store_true", help="one JSON document")

    # Ending runs, and going on with them.
    for name, command, text in (
        ("stop", _stop, "commit a checkpoint and end; `resume` goes on"),
        ("cancel", _cancel, "end a run for good; its checkpoints stay"),
        ("resume", _resume, "submit an ended run again, from its last checkpoint"),
    ):
        sub = _add(commands, name, command, text)
        sub.add_argument("run", metavar="RUN")
        if name == "resume":
            _takes_trust(sub)
            sub.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
            sub.add_argument("--follow", action="store_true", help="wait, and show the progress meanwhile")
            sub.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as train.epochs=90")

    # Checkpoints and trained models.
    check = _add(commands, "resume-check", _resume_check, "train twice, once with a kill in it, and compare every step")
    _takes_config(check)
    check.add_argument("--steps", type=int, default=60, help="of each of the two runs; default 60")
    check.add_argument("--at", type=int, metavar="STEP", help="where the blow falls; default: a random one")
    check.add_argument("--how", default="kill", help="kill (default) or stop: a signal after which the run commits")
    check.add_argument("--then-ranks", type=int, metavar="N", help="go on with another number of ranks")
    check.add_argument("--tolerance", type=float, default=1e-3, help="for the loss, with --then-ranks; default 1e-3")
    check.add_argument("--seed", type=int, help="repeats a check; default: a random one, which is printed")
    check.add_argument("--executor", default="auto", help="auto (default), slurm, local")
    check.add_argument("--json", action="store_true", help="one JSON document")

    saved = _add(commands, "checkpoint", _checkpoint, "a run's checkpoints: list, verify, diff, export, prune")
    saved.usage = (
        "toolkit checkpoint {list,verify,diff,prune} RUN [STEP] [STEP] [--with RUN] [--keep N] [--json]\n"
        "       toolkit checkpoint export RUN [STEP] --to PATH [--as {safetensors,torch,dcp}]\n"
        "                [--weights {average,raw} | --all]"
    )
    saved.add_argument("verb", choices=["list", "verify", "diff", "export", "prune"])
    saved.add_argument("run", metavar="RUN")
    saved.add_argument("steps", nargs="*", metavar="STEP", help="verify: default all; diff: two, or the newest two")
    saved.add_argument("--to", metavar="PATH", help="export: a new .safetensors, .pt or .pth file, or a folder")
    saved.add_argument("--as", dest="form", choices=["safetensors", "torch", "dcp"], help="export: default by the name")
    saved.add_argument("--all", action="store_true", help="export: the optimizer's state as well")
    _takes_weights(saved)
    saved.add_argument("--with", dest="other", metavar="RUN", help="diff: the second one is of this run")
    saved.add_argument("--keep", type=int, default=2, help="prune: so many stay, 2 or more; default 2")
    saved.add_argument("--json", action="store_true", help="list: one JSON document")

    evaluate = _add(commands, "evaluate", _evaluate, "judge a trained model on one device, or have it classify images")
    evaluate.add_argument("run", metavar="RUN")
    _takes_checkpoint(evaluate)
    _takes_trust(evaluate)
    evaluate.add_argument(
        "--data", nargs="+", action="extend", default=[], metavar="key=value", help="such as root=DIR"
    )
    evaluate.add_argument("--images", metavar="FOLDER", help="classify the images in it, instead of the eval set")
    evaluate.add_argument("--output", metavar="FILE", help="figures: .json; with --images: .csv or .jsonl")
    evaluate.add_argument("--json", action="store_true", help="one JSON document")

    export = _add(commands, "export", _export_model, "a trained model as files that need no toolkit")
    export.add_argument("run", metavar="RUN")
    export.add_argument("out", metavar="OUT", help="a new folder")
    _takes_checkpoint(export)
    _takes_trust(export)
    forms = ["safetensors", "program", "both"]
    export.add_argument("--format", dest="form", choices=forms, default="both", help="default: both")
    export.add_argument("--json", action="store_true", help="one JSON document")

    # This machine, the cluster and the data.
    env = _add(commands, "env", _env, "the placement that this process derives, and from what")
    env.add_argument("--json", action="store_true", help="one JSON document")

    doctor = _add(commands, "doctor", _doctor, "check nodes as every job does before its ranks start")
    doctor.usage = "toolkit doctor [--nodes N] [--json] [CONFIG] [key=value ...]"
    doctor.add_argument("overrides", nargs="*", metavar="[CONFIG] [key=value]", help="such as cluster.partition=gpu")
    doctor.add_argument("--nodes", type=int, help="default: those of this allocation, or cluster.nodes")
    doctor.add_argument("--json", action="store_true", help="one JSON document")

    data = _add(commands, "data", _data_fetch, "data sets: `toolkit data fetch NAME`, on the login node")
    data.add_argument("verb", choices=["fetch"])
    data.add_argument("name", metavar="NAME")
    data.add_argument("--root", help="default: $TOOLKIT_DATA, or ./data")

    board = _add(commands, "tensorboard", _tensorboard, "open TensorBoard on runs")
    board.add_argument("run", nargs="*", metavar="RUN", help="default: all runs")
    board.add_argument("--port", type=int, default=6006)
    return parser


def _add(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, conflict_handler="resolve")
    sub.set_defaults(command=command)
    return sub


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=0.1")
    parser.add_argument("-h", "--help", action=_Help, help="this page; behind CONFIG every key that it can set")


class _Help(argparse.Action):
    """Show the command's own page, or the keys of the config that stands before it."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        if getattr(namespace, "config", None) is None:
            parser.print_help()
            parser.exit()
        namespace.command = _keys


def _takes_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="newest", metavar="STEP|best|newest", help="default: newest")
    _takes_weights(parser)


def _takes_weights(parser: argparse.ArgumentParser) -> None:
    text = "default: the moving average if there is one, of which the run's figures are"
    parser.add_argument("--weights", choices=["average", "raw"], help=text)


def _takes_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="of another user's run: run their sources as yourself")


def _keys(args: argparse.Namespace) -> int:
    from toolkit.cli import keys

    print(keys.page(args.config, args.overrides))
    return EXIT_DONE


def _submit(args: argparse.Namespace) -> int:
    from toolkit.launch.submission import submit

    if args.dry_run:
        print(submit.dry_run(args.config, args.overrides, executor=args.executor))
        return EXIT_DONE
    return _see_through(submit.submit(args.config, args.overrides, executor=args.executor), args)


def _new(args: argparse.Namespace) -> int:
    from toolkit import fsio
    from toolkit.cli import new

    folder = fsio.expand(args.folder)
    print(*new.create(folder, args.example), sep="\n")
    print(f"next: cd {folder} && toolkit submit {new.target(folder.name, args.example)} --follow")
    return EXIT_DONE


def _resume(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.launch.submission import submit

    return _see_through(submit.resume(_trusted(rundir.find(args.run), args), args.overrides), args)


def _trusted(run: Any, args: argparse.Namespace) -> Any:
    """Return ``run``. With ``--trust`` its owner's sources may run as this user."""
    from toolkit import trust

    if args.trust:
        trust.trust_owner(run.path)
    return run


def _see_through(run: Any, args: argparse.Namespace) -> int:
    from toolkit.cli import follow

    follow.announce(run)
    return follow.to_the_end(run, bar=args.follow) if args.wait or args.follow else EXIT_DONE


def _supervise(args: argparse.Namespace) -> int:
    from toolkit.launch.submission import inside_allocation

    inside_allocation.supervise(args.config, args.overrides)
    return EXIT_DONE


def _run(args: argparse.Namespace) -> int:
    from toolkit.launch.start.rank import run_rank

    return run_rank(args.config, args.overrides)


def _status(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import show

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()[-10:]
    rows = show.status_rows(runs)
    print(show.as_json(rows) if args.json else show.status_table(rows))
    return EXIT_DONE


def _logs(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import show

    if args.attempt is not None and args.rank is None:
        raise RequestError("logs: --attempt goes with --rank; the supervisor has one log for all attempts")
    if args.attempt is not None and args.attempt < 1:
        raise RequestError(f"logs: --attempt {args.attempt}: attempts are counted from 1")
    show.logs(rundir.find(args.run), rank=args.rank, attempt=args.attempt, follow=args.follow)
    return EXIT_DONE


def _exec(args: argparse.Namespace) -> int:
    from toolkit.launch.submission import submit

    if not args.words:
        raise RequestError("toolkit exec: say what to run, after `--`: toolkit exec cluster.nodes=2 -- python train.py")
    # Inside a job the script runs right here, in the job's allocation.
    if args.executor == "auto" and "SLURM_JOB_ID" in os.environ:
        submit.supervise_command(args.words, args.overrides, name=args.name)
        return EXIT_DONE
    run = submit.submit_command(args.words, args.overrides, name=args.name, executor=args.executor)
    return _see_through(run, args)


def _why(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import show, why

    told = why.facts(rundir.find(args.run))
    print(show.as_json(told) if args.json else why.page(told))
    return EXIT_DONE


def _stop(args: argparse.Namespace) -> int:
    return _end(args.run, "stop", "asked to commit a checkpoint and end; `toolkit resume {run}` goes on from there")


def _cancel(args: argparse.Namespace) -> int:
    text = "cancelled; its checkpoints stay, `toolkit resume {run}` goes on from the last one"
    return _end(args.run, "cancel", text)


def _end(name: str, how: str, text: str) -> int:
    from toolkit import rundir
    from toolkit.launch.record import request
    from toolkit.launch.submission.submit import attach

    run = rundir.find(name)
    result = run.result()
    if result is not None:
        print(f"run {run.id} has already ended: {result['state']}")
        return EXIT_DONE
    # Asking again is harmless, but the answer should say so.
    before = request.asked(run)
    getattr(attach(run), how)()
    if before in (how, request.Intent.CANCEL):
        text = f"{before} was asked for before; it has been told again, which changes nothing"
    print(f"run {run.id}: {text.format(run=run.id)}")
    return EXIT_DONE


def _checkpoint(args: argparse.Namespace) -> int:
    from toolkit import rundir
    from toolkit.cli import checkpoints, show

    run = rundir.find(args.run)
    # Each verb takes another number of steps; more words are an error.
    words = args.steps[{"list": 0, "prune": 0, "verify": 1, "export": 1, "diff": 2}[args.verb] :]
    if words:
        raise RequestError(f"toolkit checkpoint {args.verb} {args.run}: {words[0]!r} is one word too many")
    if args.verb == "list":
        rows = checkpoints.rows(run)
        print(show.as_json(rows) if args.json else checkpoints.page(rows))
        return EXIT_DONE
    if args.verb == "prune":
        for path in checkpoints.prune(run, args.keep):
            print(f"removed {path}")
        return EXIT_DONE
    if args.verb == "verify":
        found = list(checkpoints.verify(run, args.steps[0] if args.steps else None))
        print("\n".join(f"{path.name}: {problem or 'every byte is as it was written'}" for path, problem in found))
        return EXIT_FAILED if any(problem for _, problem in found) else EXIT_DONE
    if args.verb == "export":
        return _export(run, args)
    lines = checkpoints.diff(*checkpoints.pair(run, rundir.find(args.other) if args.other else run, args.steps))
    print("\n".join(lines or ["identical: tensors, values and meta data"]))
    return EXIT_FAILED if lines else EXIT_DONE


def _export(run: Any, args: argparse.Namespace) -> int:
    from toolkit import logs
    from toolkit.cli import checkpoints

    if args.to is None:
        raise RequestError("toolkit checkpoint export: --to PATH says where to")
    logs.setup()
    step = args.steps[0] if args.steps else None
    print(checkpoints.export(run, step, args.to, args.form, everything=args.all, weights=args.weights))
    return EXIT_DONE


def _evaluate(args: argparse.Namespace) -> int:
    from toolkit import fsio, logs, rundir
    from toolkit.cli import show
    from toolkit.cli import trained as told

    run, output = (
        _trusted(rundir.find(args.run), args),
        told.refuse_output(args.output, _OUTPUTS[args.images is not None]),
    )
    # Imports torch, so only after the request has been checked.
    paths = told.choose(run, args.checkpoint)
    logs.setup()
    from toolkit.train import inference

    with inference.trained(run, paths, data=args.data, weights=args.weights) as trained:
        if args.images is not None:
            return _classify(trained, args, output)
        recorded = {} if args.data else trained.recorded()
        found = {**trained.as_json(), "metrics": inference.figures(trained), "recorded": recorded}
    if output is not None:
        fsio.write_json(output, found)
    print(show.as_json(found) if args.json else told.page(found))
    return EXIT_DONE


#: The suffixes that ``--output`` may have, for an evaluation and for predictions.
_OUTPUTS = ((".json",), (".csv", ".jsonl"))


def _classify(trained: Any, args: argparse.Namespace, output: Any) -> int:
    """Classify images. The exit code is 1 if an image could not be read."""

    from toolkit import fsio
    from toolkit.cli import show
    from toolkit.cli import trained as told
    from toolkit.data.pictures import image_files
    from toolkit.train import inference

    folder = fsio.expand(args.images)
    rows = list(inference.predictions(trained, folder, image_files(folder)))
    # A file gets the predictions; stdout gets them only without one, or as JSON.
    if output is not None:
        fsio.write_atomic(output, told.as_csv(rows) if output.suffix == ".csv" else told.as_json_lines(rows))
    if args.json:
        print(show.as_json({**trained.as_json(), "predictions": rows}))
    elif output is None:
        print(told.as_csv(rows), end="")
    else:
        print(f"{output}: {len(rows)} images")
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_DONE


def _export_model(args: argparse.Namespace) -> int:

    from toolkit import logs, rundir
    from toolkit.cli import show
    from toolkit.cli import trained as told

    target = fsio.expand(args.out).absolute()
    if target.exists() or not target.parent.is_dir():
        reason = "is there already; choose another name" if target.exists() else "is in a folder that does not exist"
        raise RequestError(f"toolkit export: {target} {reason}")
    run = _trusted(rundir.find(args.run), args)
    paths = told.choose(run, args.checkpoint)
    logs.setup()
    # Imports torch, so only after the request has been checked.
    from toolkit.train import inference, program

    with inference.trained(run, paths, weights=args.weights) as trained:
        found = program.export(trained, target, args.form)
    print(show.as_json(found) if args.json else told.exported(found, target))
    return EXIT_DONE


def _resume_check(args: argparse.Namespace) -> int:
    from toolkit import logs
    from toolkit.cli import show
    from toolkit.diagnose import resume_check

    logs.setup()
    plan = resume_check.CheckPlan(args.steps, args.how, args.at, args.seed, args.then_ranks, args.tolerance)
    report = resume_check.check(args.config, args.overrides, plan, args.executor)
    print(show.as_json(resume_check.as_dict(report)) if args.json else resume_check.page(report))
    return EXIT_DONE if report.is_identical else EXIT_FAILED


def _env(args: argparse.Namespace) -> int:
    from toolkit.cli import show

    facts = show.environment_facts()
    print(json.dumps(facts, indent=2) if args.json else show.environment_table(facts))
    return EXIT_DONE


def _doctor(args: argparse.Namespace) -> int:
    from toolkit import config as configs
    from toolkit import logs
    from toolkit.cli import show
    from toolkit.diagnose import doctor

    files = [word for word in args.overrides if "=" not in word]
    if len(files) > 1 or (args.nodes is not None and args.nodes < 1):
        raise RequestError("toolkit doctor: one CONFIG at most, then key=value; --nodes takes 1 or more")
    logs.setup()
    config = configs.load_config(files[0] if files else None, [word for word in args.overrides if "=" in word])
    config.job = configs.FOREIGN_JOB  # a job that is never started: only the cluster's part is used
    configs.validate(config)
    report = doctor.examine(config, args.nodes)
    lines = [*report.summary(), *doctor.about_requeue()]
    print(show.as_json(doctor.as_dict(report)) if args.json else show.nodes_page(doctor.rows(report), lines))
    return EXIT_DONE if report.is_fine else EXIT_FAILED


def _data_fetch(args: argparse.Namespace) -> int:
    from toolkit.data.datasets import fetch

    print(fetch(args.name, args.root))
    return EXIT_DONE


#: TensorBoard reads a thousand runs for 17 s and keeps a core busy after that; 1,600 do not fit into an argument.
TENSORBOARD_RUNS = 100


def _tensorboard(args: argparse.Namespace) -> int:
    """Replace this process by TensorBoard, so that Ctrl-C reaches it directly."""
    from toolkit import rundir

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()
    if not runs:
        raise RequestError(f"there are no runs under {rundir.runs_root()}")
    if not args.run and len(runs) > TENSORBOARD_RUNS:
        print(f"the newest {TENSORBOARD_RUNS} of {len(runs)} runs; name others to see them", file=sys.stderr)
        runs = runs[-TENSORBOARD_RUNS:]
    os.chdir(runs[0].path.parent.parent)  # for short, relative paths: a comma in an absolute one would end it
    folders = ",".join(f"{run.name}/{run.id}:{os.path.relpath(run.tensorboard)}" for run in runs)
    argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir_spec", folders, "--port", str(args.port)]
    os.execv(argv[0], argv)
    return EXIT_FAILED
