"""make a project of your own from an example"""

import shlex
from argparse import ArgumentParser, Namespace

EXAMPLES = (
    ("toolkit new mine", "a project with a job, a config, a batch script and a test"),
    ("toolkit new mine --from language_model", "from another example"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="NAME", help="its folder, which is made")
    parser.add_argument(
        "--from",
        dest="example",
        default="classify",
        metavar="EXAMPLE",
        help="classify (default), language_model, loop, lightning, transformers, accelerate",
    )


def run(args: Namespace) -> None:
    from toolkit.base import fsio, terminal
    from toolkit.cli import new_project as new

    folder = fsio.expand(args.folder)
    print(*new.create(folder, args.example), sep="\n")
    there, target = shlex.quote(str(folder)), new.target(folder.name, args.example)
    terminal.say(f"next: `cd {there} && toolkit submit {target} --follow`")
