"""judge a trained model on one device, or have it classify images"""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, RequestError
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit evaluate digits-ddp --checkpoint best", "judge the best checkpoint on this machine"),
    ("toolkit evaluate digits-ddp --submit", "by a job of its own, when the run has completed"),
    ("toolkit evaluate digits-ddp --per-class", "recall, precision and F1 of each class, and what it is taken for"),
    ("toolkit evaluate digits-ddp --images photos --output classes.csv", "classify the images of a folder"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    arguments.add_checkpoint(parser)
    arguments.add_trust(parser)
    parser.add_argument("--data", nargs="+", action="extend", default=[], metavar="key=value", help="such as root=DIR")
    parser.add_argument("--per-class", action="store_true", help="recall, precision and F1 of each class as well")
    parser.add_argument("--images", metavar="FOLDER", help="classify the images in it, instead of the eval set")
    parser.add_argument("--keep", action="store_true", help="write the figures into the run, as evaluation.json")
    text = "--keep in a job of its own, on one node like the run's, when the run has completed"
    parser.add_argument("--submit", action="store_true", help=text)
    parser.add_argument("--output", metavar="FILE", help="figures: .json; with --images: .csv or .jsonl")
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit.base import fsio, logs, terminal
    from toolkit.plugins.inference import evaluate_and_export

    if args.per_class and args.images is not None:
        raise RequestError("--per-class: the classes of --images are not known; leave out one of them")
    run = arguments.trusted_run(args)
    if args.submit:
        from toolkit.cli import follow

        follow.announce(evaluate_and_export.submit_evaluation(run, args))
        return EXIT_DONE
    output = evaluate_and_export.refuse_output(args.output, (".json",) if args.images is None else (".csv", ".jsonl"))
    paths = evaluate_and_export.choose(run, args.checkpoint)
    logs.setup()
    # Imports torch, so only after the request has been checked.
    from toolkit.plugins.inference import trained_model as inference

    with terminal.unguarded(), inference.trained(run, paths, data=args.data, weights=args.weights) as model:
        if args.images is not None:
            return _classify(model, args, output)
        recorded = {} if args.data else model.recorded()
        found = {**model.as_json(), "metrics": inference.evaluate(model), "recorded": recorded}
        if args.per_class:
            found["classes"] = inference.by_class(model)
    if output is not None:
        fsio.write_json(output, found)
    if args.keep:
        fsio.write_json(run.path / "evaluation.json", found)
    print(arguments.as_json(found) if args.json else evaluate_and_export.format_text(found))
    return EXIT_DONE


def _classify(model: Any, args: Namespace, output: Any) -> int:
    """Classify images. The exit code is 1 if an image could not be read."""
    from toolkit.base import fsio, terminal
    from toolkit.plugins.inference import evaluate_and_export
    from toolkit.plugins.inference import trained_model as inference

    folder = fsio.expand(args.images)
    rows = list(inference.predictions(model, folder, inference.image_files(folder)))
    # A file gets the predictions; stdout gets them only without one, or as JSON.
    if output is not None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        fsio.write_atomic(output, evaluate_and_export.as_csv(rows) if output.suffix == ".csv" else lines)
    with terminal.guarded():
        if args.json:
            print(arguments.as_json({**model.as_json(), "predictions": rows}))
        elif output is None:
            # A program gets the files' names byte for byte.
            text = evaluate_and_export.as_csv(rows)
            print(text.decode(errors="replace"), end="") if sys.stdout.isatty() else sys.stdout.buffer.write(text)
        else:
            print(f"{output}: {len(rows)} images")
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_DONE
