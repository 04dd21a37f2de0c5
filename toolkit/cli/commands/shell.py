"""open a shell with a run's nodes, environment and sources

On Slurm it asks for the nodes of the run or config, and opens a shell on the
first one; without Slurm, and inside a job, on this machine. cluster.setup is
carried out, the folder is the run's, and Python imports from the run's copy of
the sources. The run itself is not touched. With `-- CMD` that is run instead.
"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError

EXAMPLES = (
    ("toolkit shell gpt cluster.nodes=1 cluster.time_min=60", "as the newest run named gpt, on one node for an hour"),
    ("toolkit shell configs/digits_ddp.yaml", "as a run of this config would have it, in the current folder"),
    ("toolkit shell gpt -- python -m pdb train.py", "one command instead of a shell"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "toolkit shell RUN|CONFIG [key=value ...] [--executor E] [-- CMD ...]"
    parser.add_argument("of", metavar="RUN|CONFIG", help="a run, or a YAML file or script")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as cluster.time_min=60")
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local; inside a job: right here")


def run(args: Namespace) -> None:
    """Replace this process by the shell, or by salloc."""
    import os
    import sys

    from toolkit.base import terminal
    from toolkit.cli import shell_environment
    from toolkit.run.submission.executors import choose_executor
    from toolkit.slurm.srun_commands import salloc_argv

    is_here = "SLURM_JOB_ID" in os.environ and args.executor == "auto"
    executor = "local" if is_here else choose_executor(args.executor)
    if executor not in ("slurm", "local"):
        raise RequestError(f"--executor: unknown value {executor!r}; valid: slurm, local")
    if not args.words and not sys.stdin.isatty():
        raise RequestError("toolkit shell: this is not a terminal; `toolkit shell RUN -- CMD` runs a command")
    found = shell_environment.environment_of(args.of, args.overrides)
    argv = found.command(args.words)
    if executor == "slurm":
        argv = salloc_argv(found.options(), argv, is_terminal=not args.words)
    terminal.say(found.sentence(), sys.stderr)
    sys.stdout.flush()
    os.execvp(argv[0], argv)
