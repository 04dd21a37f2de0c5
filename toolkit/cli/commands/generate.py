"""continue texts with a trained language model"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError
from toolkit.cli import arguments

EXAMPLES = (
    ('toolkit generate gpt-fsdp "import os"', "one text; several are one batch"),
    ("toolkit generate gpt-fsdp --temperature 0 --json", "each line of the standard input, by the most likely tokens"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="default: the lines of the standard input")
    arguments.add_checkpoint(parser)
    arguments.add_trust(parser)
    text = "tokens to add to each text; default: 64, or fewer where the model sees no more"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=text)
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0: the most likely")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens only")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws; default: 0")
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit.base import logs, terminal
    from toolkit.plugins.inference import evaluate_and_export

    _check(args)
    run = arguments.trusted_run(args)
    paths = evaluate_and_export.choose(run, args.checkpoint)
    texts = args.texts or _lines()
    logs.setup()
    # Imports torch, so only after the request has been checked.
    from toolkit.plugins.inference import trained_model as inference

    sampling = inference.Sampling(args.temperature, args.top_k, args.seed)
    with terminal.unguarded(), inference.trained(run, paths, weights=args.weights) as model:
        found = inference.continuations(model, texts, args.max_tokens, sampling)
    if args.json:
        print(arguments.as_json({**model.as_json(), "continuations": found}))
        return
    for number, row in enumerate(found):
        if len(found) > 1:
            print(f"{'' if number == 0 else chr(10)}{inference.shortened(row['prompt'])}:")
        print(row["text"])


def _check(args: Namespace) -> None:
    for name, value, least in (("max-tokens", args.max_tokens, 1), ("top-k", args.top_k, 1), ("seed", args.seed, 0)):
        if value is not None and not least <= value < 1 << 31:
            raise RequestError(f"--{name}: {value} is out of range; must be {least} or more, and below 2**31")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise RequestError(
            f"--temperature: {args.temperature} is out of range; must be 0 or more; 0 takes the most likely token"
        )


def _lines() -> list[str]:
    """Return the lines of the standard input, without empty ones. Raises RequestError where there are none."""
    if sys.stdin.isatty():
        raise RequestError("toolkit generate: give a TEXT to continue, or lines on the standard input")
    try:
        lines = [line for line in sys.stdin.buffer.read().decode().splitlines() if line]
    except UnicodeDecodeError as error:
        raise RequestError(f"toolkit generate: the standard input is not text in UTF-8: {error}") from None
    if not lines:
        raise RequestError("toolkit generate: there is no text on the standard input")
    return lines
