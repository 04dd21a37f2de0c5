"""show your runs in a browser, live, on this machine only

The page shows the runs below the folder for runs: a table, and of each run its
curves, logs, config, checkpoints and what `toolkit why` says. It only reads
files, and asks Slurm no more than `toolkit watch` does. Ctrl-C ends it.
"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError

EXAMPLES = (
    ("toolkit serve", "all runs; the address to open is printed"),
    ("toolkit serve --name 'gpt*' --since 2w --port 8080", "some of them, at a given port"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="default: all runs")
    parser.add_argument("--since", metavar="TIME", help="submitted since then: 90min, 12h, 2d, 1w or 2026-01-31")
    parser.add_argument("--name", metavar="PATTERN", help="name of the config, such as 'gpt*'")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")


def run(args: Namespace) -> None:
    from toolkit.base import terminal
    from toolkit.cli.commands.tensorboard import tunnel_command

    try:
        from toolkit.plugins.report.server import HOST, PageServer
    except ImportError as error:
        raise RequestError(f"toolkit serve needs {error.name}: pip install 'slurm-batch-toolkit[web]'") from error
    from toolkit.plugins.report.live import LiveRuns
    from toolkit.slurm import shared_queue

    runs = LiveRuns(Namespace(**vars(args), state=None), shared_queue.of_user())
    runs.find("")  # a run that is not there is named before the page is opened
    server = PageServer(runs, args.port)
    terminal.say(f"open {server.url}")
    if not terminal.login_from_laptop():  # `toolkit --on` has brought the port there
        terminal.say(f"from your own machine, first: {tunnel_command(HOST, server.port)}")
    terminal.say("the address gives access to your runs: do not share it; Ctrl-C ends the page, the runs continue")
    server.run()
