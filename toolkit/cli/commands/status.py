"""show the state of runs, by their files first and Slurm second

A run's own files come first. Slurm is asked, once for all, about runs that wait
or whose supervisor is silent, and the answer is shared by all your processes.
The note of a run says what it waits for, why it ended, and which of its files
cannot be read; of one run all is shown below the table.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments, selection, tables

EXAMPLES = (
    ("toolkit status", "the ten newest runs"),
    ("toolkit status gpt", "the newest run of the config named gpt, with where its time went"),
    ("toolkit status --state failed,lost --since 2d --name 'gpt*'", "what went wrong in the last two days"),
    ("toolkit status --all --sort eval/accuracy --columns run,optim.lr,eval/accuracy", "all runs, the best last"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="default: the ten newest runs")
    parser.add_argument("--all", action="store_true", help="all runs; the default with a filter")
    selection.add_arguments(parser)
    parser.add_argument("--sort", metavar="COLUMN", help="a column, metric or config key; default: run")
    parser.add_argument("--reverse", action="store_true", help="the highest first")
    columns = "separated by commas: columns of the table, metrics and config keys"
    parser.add_argument("--columns", metavar="NAMES", help=columns)
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    import gc
    import sys
    from pathlib import Path

    from toolkit.cli import columns, run_rows
    from toolkit.files import rundir

    gc.disable()  # with 10,000 rows its search for garbage takes as long as the rest, and there is none
    is_short = not (args.run or args.all or selection.is_asked(args))
    runs = selection.named(args.run)[0] if args.run else rundir.all_runs()
    if is_short and (sweeps := rundir.sweep_paths()):
        from toolkit.plugins.sweep import rows as sweep_rows

        rows = sweep_rows.newest(runs, sweeps, run_rows.status_rows)
    else:
        rows = run_rows.status_rows(selection.by_path(runs, args)[-10 if is_short else 0 :])
    rows = selection.by_state(rows, args.state)
    names = tuple(filter(None, (args.columns or "").split(",")))
    sort = args.sort or "run"
    if columns.needs_config((*names, sort)):
        configs = run_rows.map_runs(run_rows.read_config, [rundir.RunDir(Path(row.path)) for row in rows])
        for row, config in zip(rows, configs, strict=True):
            row.config = config
    columns.check((*names, sort), rows)
    if args.sort or args.reverse:  # else they are in the order of their names, or in the one asked for
        rows = columns.in_order(rows, sort, args.reverse)
    if args.json:
        print(arguments.as_json([vars(row) for row in rows]))
        return
    if not rows and runs:
        print(f"none of the {len(runs)} runs under {rundir.runs_root()} matches these filters")
        return
    # A program that asks for columns gets them whole.
    is_whole = names and not sys.stdout.isatty()
    columns.print_rows(rows, names, None if is_whole else tables.width(args))
