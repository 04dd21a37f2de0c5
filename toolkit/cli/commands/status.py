"""how runs stand, by their own files first and Slurm second"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="default: the ten newest runs")
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit import rundir
    from toolkit.cli import show

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()[-10:]
    rows = show.status_rows(runs)
    print(show.as_json(rows) if args.json else show.status_table(rows))
