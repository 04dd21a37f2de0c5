"""remove runs that are over, with their checkpoints

A run that lives, or of which Slurm does not say that its job is over, is
refused, and then nothing is removed. So is one whose weights a run that has
not ended begins with.
"""

from argparse import ArgumentParser, Namespace

EXAMPLES = (
    ("toolkit rm 20260131-120000-1a2b3c4d", "one run by its id"),
    ("toolkit rm gpt", "the newest run of the config named gpt"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN")


def run(args: Namespace) -> None:
    """Remove the runs. A run that must stay is refused before any is removed."""
    from toolkit.base.fsio import size_text
    from toolkit.cli import disk
    from toolkit.files import rundir

    disk.complete_removals(rundir.runs_root())
    runs = list(dict.fromkeys(rundir.find(name) for name in args.run))
    for root in {each.path.parent.parent for each in runs}:  # a run may be given by its path
        disk.complete_removals(root)
    used = disk.used_origins()
    for each in runs:
        disk.refuse(each, used)
    for each in runs:
        size = size_text(disk.usage(each)["bytes"])
        disk.remove(each)
        print(f"run {each.id} is removed ({size})")
