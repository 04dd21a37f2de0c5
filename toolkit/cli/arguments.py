"""Arguments that several commands take, and what becomes of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.base.errors import RequestError

if TYPE_CHECKING:  # the commands import these when they run
    from pathlib import Path

    from toolkit.files.rundir import RunDir


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and its overrides. `--help` behind a CONFIG shows the first keys, `--help-all` all that it can set."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a script; its arguments: `-- ARG ...`")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=0.1")
    parser.add_argument("-h", "--help", action=_Help, help="this page; after CONFIG: the keys used most")
    parser.add_argument("--help-all", action=_Help, help="after CONFIG: every key that can be set")


class _Help(argparse.Action):
    """Show the command's own page, or the keys of the config that stands before it."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        if getattr(namespace, "config", None) is None:
            parser.print_help()
            parser.exit()
        namespace.run_command = partial(_print_keys, every=self.option_strings == ["--help-all"])


def _print_keys(args: argparse.Namespace, *, every: bool) -> None:
    from toolkit.cli import keys

    # A sweep's arguments have many values for a key.
    is_sweep = args.command == "sweep"
    print(keys.page(args.config, [] if is_sweep else args.overrides, sweep=is_sweep, every=every))


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Add ``--wait``, ``--follow`` and ``--json``, for `follow.announce_and_wait`."""
    parser.add_argument("--wait", action="store_true", help="wait for the end; the exit code is the job's")
    parser.add_argument("--follow", action="store_true", help="wait, and show the progress meanwhile")
    parser.add_argument("--json", action="store_true", help="print run id, job id and folder as one JSON document")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch script and config, submit nothing")


def add_after(parser: argparse.ArgumentParser) -> None:
    text = "start only when this run, or all runs of this sweep, have completed; may be given several times"
    parser.add_argument("--after", action="append", default=[], metavar="RUN", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def as_json(value: Any) -> str:
    """Return one JSON document. A loss that is not a number becomes null: JSON has no other word for it."""
    from toolkit.base import fsio

    try:
        return json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(fsio.nonfinite_to_none(value), indent=2, allow_nan=False)


def add_weights(parser: argparse.ArgumentParser) -> None:
    text = "default: the moving average if there is one, of which the run's figures are"
    parser.add_argument("--weights", choices=["average", "raw"], help=text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="of another user's run: run their sources as yourself")


def trusted_run(args: argparse.Namespace) -> RunDir:
    """Return the run that RUN names. With ``--trust`` its owner's sources may run as this user."""
    from toolkit.base import trust
    from toolkit.files import rundir

    run = rundir.find(args.run)
    if args.trust:
        trust.trust_owner(run.path)
    return run


def new_path(argument: str, text: str) -> Path:
    """Return the absolute path of a new file or folder. Raises RequestError if it is there, or its folder is not."""
    from toolkit.base import fsio

    path = fsio.expand(text).absolute()
    if path.exists() or not path.parent.is_dir():
        reason = "already exists; choose another name" if path.exists() else "is in a folder that does not exist"
        raise RequestError(f"{argument}: {path} {reason}")
    return path


def replaceable_path(argument: str, text: str, begin: str) -> Path:
    """Return the path of a file to write, which replaces only one that begins with ``begin``. Raises RequestError."""
    from toolkit.base import fsio

    path = fsio.expand(text).absolute()
    if not path.parent.is_dir():
        raise RequestError(f"{argument}: {path.parent} is not a folder")
    try:
        with fsio.open_file(path) as file:
            is_ours = file.read(len(begin.encode())) == begin.encode()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise RequestError(f"{argument}: {path}: {error.strerror or error}") from None
    if not is_ours:
        raise RequestError(f"{argument}: {path} already exists, and this command did not write it; choose another name")
    return path


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint, and which of its weights."""
    parser.add_argument("--checkpoint", default="newest", metavar="STEP|best|newest", help="default: newest")
    add_weights(parser)
