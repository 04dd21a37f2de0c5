"""list, verify, compare, export or prune a run's checkpoints"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import EXIT_FAILED, RequestError
from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit checkpoint list gpt", "the checkpoints of the newest run named gpt"),
    ("toolkit checkpoint verify gpt 2000", "read every byte of one and compare the checksums"),
    ("toolkit checkpoint diff gpt 1000 2000", "which tensors changed between two steps"),
    ("toolkit checkpoint export gpt --to gpt.safetensors", "the weights as one file"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "toolkit checkpoint {list,verify,diff,prune} RUN [STEP] [STEP]\n"
        "                [--with RUN] [--keep N] [--wide] [--json]\n"
        "       toolkit checkpoint export RUN [STEP] --to PATH\n"
        "                [--as {safetensors,torch,dcp}] [--weights {average,raw} | --all]"
    )
    parser.add_argument("verb", choices=["list", "verify", "diff", "export", "prune"])
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="verify: default all; diff: two, or the newest two")
    parser.add_argument("--to", metavar="PATH", help="export: a new .safetensors, .pt or .pth file, or a folder")
    forms = ["safetensors", "torch", "dcp"]
    parser.add_argument("--as", dest="form", choices=forms, help="export: default by the name")
    parser.add_argument("--all", action="store_true", help="export: the optimizer's state as well")
    arguments.add_weights(parser)
    parser.add_argument("--with", dest="other", metavar="RUN", help="diff: the second one is of this run")
    parser.add_argument("--keep", type=int, default=2, help="prune: how many to keep, 2 or more; default 2")
    tables.add_wide(parser)
    parser.add_argument("--json", action="store_true", help="list: one JSON document")


def run(args: Namespace) -> int | None:
    from toolkit.base import logs
    from toolkit.cli import checkpoints
    from toolkit.files import rundir

    run = rundir.find(args.run)
    # Each verb takes another number of steps; more words are an error.
    words = args.steps[{"list": 0, "prune": 0, "verify": 1, "export": 1, "diff": 2}[args.verb] :]
    if words:
        raise RequestError(f"toolkit checkpoint {args.verb} {args.run}: unexpected argument {words[0]!r}; leave it out")
    step = args.steps[0] if args.steps else None
    if args.verb == "list":
        rows = checkpoints.rows(run)
        if args.json:
            print(arguments.as_json(rows))
        elif rows:
            checkpoints.table(rows, tables.width(args)).print()
        else:
            print("no checkpoints")
    elif args.verb == "prune":
        for path in checkpoints.prune(run, args.keep):
            print(f"removed {path}")
    elif args.verb == "verify":
        found = list(checkpoints.verify(run, step))
        print("\n".join(f"{path.name}: {problem or 'OK (checksums match)'}" for path, problem in found))
        return EXIT_FAILED if any(problem for _, problem in found) else None
    elif args.verb == "export":
        if args.to is None:
            raise RequestError("toolkit checkpoint export: --to is missing; give the path of the file to write")
        logs.setup()
        print(checkpoints.export(run, step, args.to, args.form, everything=args.all, weights=args.weights))
    else:
        lines = checkpoints.diff(*checkpoints.pair(run, rundir.find(args.other) if args.other else run, args.steps))
        print("\n".join(lines or ["identical: tensors, values and meta data"]))
        return EXIT_FAILED if lines else None
    return None
