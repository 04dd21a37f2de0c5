"""write a trained model as files that need no toolkit"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError
from toolkit.cli import arguments

EXAMPLES = (("toolkit export digits-ddp exported", "weights and a program that torch alone runs, in a new folder"),)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    arguments.add_checkpoint(parser)
    arguments.add_trust(parser)
    forms = ["safetensors", "program", "both"]
    parser.add_argument("--format", dest="form", choices=forms, default="both", help="default: both")
    parser.add_argument("--aot", action="store_true", help="compile the program, too, for processors like this one")
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit.base import logs, terminal
    from toolkit.plugins.inference import evaluate_and_export

    if args.aot and args.form == "safetensors":
        raise RequestError("--aot: compiles the program, and --format safetensors makes none; leave out one of them")
    target = arguments.new_path("toolkit export", args.out)
    paths = evaluate_and_export.choose(run := arguments.trusted_run(args), args.checkpoint)
    logs.setup()
    # Imports torch, so only after the request has been checked.
    from toolkit.plugins.inference import exported_program
    from toolkit.plugins.inference import trained_model as inference

    with terminal.unguarded(), inference.trained(run, paths, weights=args.weights) as model:
        found = exported_program.export(model, target, args.form, compiles=args.aot)
    print(arguments.as_json(found) if args.json else evaluate_and_export.exported(found, target))
