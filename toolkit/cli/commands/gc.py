"""show the disk that each run takes, and remove old runs

Nothing is removed without --remove, and a run that lives never. PURGED counts
the files that a site's purge takes which goes by the last access.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit gc", "what each run takes, the largest first"),
    ("toolkit gc --older-than 30d", "what has not changed for 30 days, and what a site's purge will take"),
    ("toolkit gc --older-than 90d --name 'sweep*' --remove", "remove those that are over"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="TIME", help="runs without a change since then: 12h, 30d, 8w")
    parser.add_argument("--name", metavar="PATTERN", help="name of the config, such as 'gpt*'")
    parser.add_argument("--remove", action="store_true", help="remove them; without it nothing is changed")
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    import time
    from fnmatch import fnmatchcase
    from pathlib import Path

    from toolkit.base.errors import RequestError
    from toolkit.cli import disk, selection
    from toolkit.files import rundir

    if args.remove and args.older_than is None:
        raise RequestError("gc: --remove goes with --older-than TIME; `toolkit rm RUN` removes a run by its name")
    older_than_s = None
    if args.older_than is not None:
        older_than_s = time.time() - selection.parse_since("--older-than", args.older_than, time.time())
    runs = [each for each in rundir.all_runs() if args.name is None or fnmatchcase(each.name, args.name)]
    rows = disk.rows(runs, older_than_s)
    going = [row for row in rows if row["removed"]]
    # A removal that was interrupted has left folders that no listing shows.
    if args.remove:
        disk.complete_removals(rundir.runs_root())
    for row in going if args.remove else ():
        disk.remove(rundir.RunDir(Path(row["path"])))
    print(arguments.as_json(rows)) if args.json else disk.print_page(rows, going, args)
