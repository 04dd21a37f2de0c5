"""send metrics to mlflow or wandb, or write them as CSV"""

from argparse import ArgumentParser, Namespace

from toolkit import registry
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, RequestError

EXAMPLES = (
    ("toolkit upload gpt wandb --project mine", "the newest run named gpt, as a run of W&B"),
    ("toolkit upload gpt digits-ddp mlflow --follow", "two runs, until both have ended"),
    ("toolkit upload gpt csv --to gpt.csv", "all points as a table"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN")
    parser.add_argument("tracker", choices=[*registry.names("trackers"), "csv"])
    parser.add_argument("--project", metavar="NAME", help="mlflow: the experiment; default: the run's name")
    parser.add_argument("--follow", action="store_true", help="continue until the runs have ended")
    parser.add_argument("--all", action="store_true", help="also steps that a resume would repeat")
    parser.add_argument("--to", metavar="FILE", help="csv: default: standard output")


def run(args: Namespace) -> int:
    from toolkit.base import logs
    from toolkit.cli import selection
    from toolkit.plugins.trackers import upload

    runs, _ = selection.named(list(dict.fromkeys(args.run)))
    if args.tracker == "csv":
        if args.project or args.all or (args.follow and not args.to):
            raise RequestError(
                "toolkit upload csv writes all points: leave out --project and --all; --follow needs --to"
            )
        upload.write_csv(runs, args.to, follow=args.follow)
        return EXIT_DONE
    if args.to:
        raise RequestError(f"toolkit upload {args.tracker}: --to is for csv")
    logs.setup()
    sent_all = upload.send(runs, args.tracker, args.project, follow=args.follow, everything=args.all)
    return EXIT_DONE if sent_all else EXIT_FAILED
