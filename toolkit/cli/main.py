"""The frame of the ``toolkit`` command: find the commands, parse, dispatch, and map errors to exit codes.

Answers go to stdout, logs and errors to stderr. Exit codes: 0 done, 1 the job failed, 2 the request was wrong,
75 stopped cleanly.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import select
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import NoReturn, TextIO

from toolkit import __version__, registry
from toolkit.base import logs, terminal
from toolkit.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEST,
    PluginError,
    RequestError,
    ToolkitError,
    did_you_mean,
)

#: The commands that come with the toolkit by what they are for, in the order of `toolkit --help`.
GROUPS = {
    "start runs": ("submit", "exec", "new", "sweep", "shell", "supervise", "run"),
    "look at runs": ("status", "watch", "serve", "follow", "logs", "why", "report", "compare", "tensorboard", "upload"),
    "while a run trains": ("stacks", "profile"),
    "end and continue runs": ("stop", "cancel", "resume", "rm", "gc"),
    "checkpoints and models": ("checkpoint", "evaluate", "generate", "export", "resume-check"),
    "this site": ("doctor", "site", "placement", "data", "completion"),
}
#: What one needs first: all that `toolkit` alone shows.
FIRST = ("new", "submit", "exec", "status", "logs", "why", "stop", "resume")
USAGE = "usage: toolkit [--on LOGIN] COMMAND ...   toolkit COMMAND --help   --version"
EPILOG = """A RUN is a run id, a unique prefix of one or its last eight digits, a config's
name (its newest run), or a path. Exit codes: 0 done, 1 the job failed, 2 the
request was wrong, 75 stopped cleanly, to be continued. --on LOGIN does it on a
login node, by ssh (docs/laptop.md); 255: no connection, or it broke."""
#: Options whose value may begin with a minus: --metric -eval/loss.
MAY_BEGIN_WITH_MINUS = ("--restart-args", "--metric")
#: The commands that take the arguments of a user's script after `--`.
TAKE_ARGUMENTS = ("submit", "sweep", "run", "supervise", "resume", "resume-check")
#: The exit code that a shell gives for SIGINT.
EXIT_INTERRUPTED = 130

log = logs.get(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    terminal.open_standard_files()
    if sys.stdout is None:  # `toolkit status >&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    # Print what the terminal's encoding lacks as escapes: the name of a file may hold any character.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with terminal.guarded():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(words: Sequence[str]) -> int:
    if words[:1] == ["__complete"]:  # by a shell, see `toolkit completion`
        code: int | None = registry.find("commands", "completion").main(words[1:])
        return code or EXIT_DONE
    logs.setup_for_command()
    is_job = words[:1] in (["run"], ["supervise"])  # these run a job, whose output is its own
    # Of one command only its own module is loaded: all would take longer than most commands.
    try:
        if any(word == "--on" or word.startswith("--on=") for word in takewhile(lambda word: word != "--", words)):
            from toolkit.cli import remote

            return remote.main(words)
        if words[:1] == ["__there"]:  # by `toolkit --on`, on the login node
            from toolkit.cli import login_side

            asked = login_side.accept_request(words[1])
            if asked is None:
                return EXIT_DONE
            words = asked
        if not words or words[0] in ("-h", "--help"):
            print(overview(groups() if words else {"the commands to start with": FIRST}))
            print(EPILOG if words else "`toolkit --help` shows all commands.")
            sys.stdout.flush()  # here, where an error of it is handled
            return EXIT_DONE
        names = () if words[0].startswith("-") else (words[0],)
        if names and registry.where("commands", words[0]) is None:
            close = did_you_mean(words[0], commands())
            raise RequestError(f"unknown command {words[0]!r}; {close}`toolkit --help` lists the commands")
        args = parse(build_parser(names), words)
        with terminal.unguarded() if is_job else contextlib.nullcontext():
            code = args.run_command(args)
        sys.stdout.flush()
        return code or EXIT_DONE
    except ToolkitError as error:
        terminal.say(f"toolkit: error: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # `toolkit logs --follow` ends only so
        return EXIT_INTERRUPTED
    except OSError as error:
        if is_job:  # its log needs the traceback
            raise
        if isinstance(error, BrokenPipeError) and _has_lost_reader(sys.stdout):  # `toolkit logs ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        # What the system refused, where, and what to do about the usual errors.
        where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "; make room, or choose another folder for runs: set TOOLKIT_RUNS"
        elif error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
            advice = "; if that is the folder for runs, choose another: set TOOLKIT_RUNS"
        text = f"{where or 'the output or the current folder'}: {error.strerror or error}{advice}"
        terminal.say(f"toolkit: error: {text}", sys.stderr)
        return EXIT_FAILED


def _has_lost_reader(stream: TextIO) -> bool:
    """True if ``stream`` is a pipe or a socket whose other end is closed."""
    poll = select.poll()
    poll.register(stream, 0)  # an error is reported without being asked for
    return poll.poll(0) != []


def groups() -> Mapping[str, Sequence[str]]:
    """Return the names of all commands by group, in the order of the help."""
    there, known = registry.names("commands"), [*chain(*GROUPS.values())]
    ours = {title: [name for name in names if name in there] for title, names in GROUPS.items()}
    theirs = [name for name in there if name not in known]
    return ours | ({"of other packages": theirs} if theirs else {})


def commands() -> list[str]:
    """Return the names of all commands, in the order of the help."""
    return [*chain(*groups().values())]


def overview(of: Mapping[str, Sequence[str]]) -> str:
    """Return the help on these commands, a line for each, which fits a terminal of 80 columns."""
    lines = [USAGE, ""]
    for title, names in of.items():
        lines.append(f"{title}:")
        for name in names:
            try:
                about = (registry.find("commands", name).__doc__ or "").partition("\n")[0]
            except PluginError as error:
                about = f"cannot be loaded: {error}"
            lines.append(f"  {name:<14}{about}")
        lines.append("")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Names the nearest valid word for a wrong one."""

    def error(self, message: str) -> NoReturn:
        line, newline, advice = message.partition("\n")
        choices = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", line)
        option = re.search(r"unrecognized arguments: (--[^\s=]+)", line)
        close = ""
        if choices is not None:
            close = did_you_mean(choices[1], re.findall(r"[\w.-]+", choices[2]))
        elif option is not None:
            close = did_you_mean(option[1], re.findall(r"(?m)^  (?:-h, )?(--[a-z-]+)", self.format_help()))
        said = f"{self.prog}: error: {line}{'; ' * bool(close)}{close.rstrip()}{newline}{advice}"
        self.print_usage(sys.stderr)
        self.exit(EXIT_REQUEST, f"{terminal.fitted(said, sys.stderr)}\n")


def build_parser(names: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of these commands, or of all."""
    parser = _Parser(prog="toolkit", usage=USAGE.partition(": ")[2])
    parser.add_argument("--version", action="version", version=f"toolkit {__version__}")
    subparsers = parser.add_subparsers(prog="toolkit", metavar="COMMAND", required=True, dest="command")
    for name in commands() if names is None else names:
        module = registry.find("commands", name)
        text = module.__doc__ or ""
        # Each example is a command line with what it does below.
        examples = "".join(f"\n  {line}\n      {what}" for line, what in getattr(module, "EXAMPLES", ()))
        command = subparsers.add_parser(
            name,
            description=text,
            epilog=f"examples:{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",  # a command may replace --help
        )
        module.add_arguments(command)
        command.set_defaults(run_command=module.run, refuse=command.error)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, with overrides in any place.

    argparse gives up on ``CONFIG --wait key=value``: what it leaves over counts as overrides if it looks like them.
    The words after ``--`` are a command of the user's (exec, shell), or the arguments of a script.
    """
    words = list(argv)
    takes_words = words[:1] and words[0] in ("exec", "shell", *TAKE_ARGUMENTS)
    cut = words.index("--") if takes_words and "--" in words else len(words)
    joined: list[str] = []
    for word in words[:cut]:
        if joined and joined[-1] in MAY_BEGIN_WITH_MINUS:  # argparse would take the value for another option
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    args, rest = parser.parse_known_args(joined)
    args.words = words[cut + 1 :]
    # An unknown option is an error; other words are overrides.
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        unknown = " ".join(text for text in rest if text.startswith("-")) or rest[0]
        keys = _as_keys(words, cut, rest)
        args.refuse(keys or f"unrecognized arguments: {unknown}{_after_dashes(args, words[:cut], rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    if args.words and words[0] in TAKE_ARGUMENTS:
        from toolkit.config import script_arguments

        # They come first: `args.epochs=3` changes one of them.
        args.overrides = [script_arguments.argv_override(args.words), *args.overrides]
    return args


def _as_keys(words: Sequence[str], cut: int, unknown: Sequence[str]) -> str:
    """Return the command line with the ``unknown`` options in ``words[:cut]`` as keys, if all are options of sbatch."""
    if words[0] not in ("exec", *TAKE_ARGUMENTS):
        return ""
    from toolkit.config.cluster import FLAGS, REFUSED, SHORT, as_override
    from toolkit.config.script_keys import acting_keys

    script = next((word for word in words[1:cut] if word.endswith(".py")), None)
    own = {option.flag for option in acting_keys(script, ()).options} if script is not None else ()
    line, notes = [*words[:cut]], list[str]()
    for place in reversed(range(1, cut)):
        flag, equals, value = words[place].partition("=")
        if not flag.startswith("-") or words[place] not in unknown:
            continue
        name = SHORT.get(flag[1:], "") if len(flag) == 2 else flag.removeprefix("--")
        if name not in FLAGS or flag in own:
            return ""
        if not equals and FLAGS[name] == "value" and place + 1 < len(line):
            value = line.pop(place + 1)
        override = as_override(name, value)
        line[place : place + 1] = [] if override is None else [override]
        notes += [] if override is not None else [f"--{name}: {REFUSED[name]}"]
    shown = shlex.join(["toolkit", *line, *words[cut:]])
    return "\n".join(["options of sbatch are keys here:", f"    {shown}", *reversed(notes)])


def _after_dashes(args: argparse.Namespace, words: Sequence[str], rest: Sequence[str]) -> str:
    """Return the command line with a script's own options where they belong; empty where no script is given."""
    if args.command not in TAKE_ARGUMENTS:
        return ""
    # Before CONFIG an option's value was taken for it.
    texts = [args.run if args.command == "resume" else args.config or "", *args.overrides]
    script = next((text for text in texts if args.command == "resume" or text.endswith(".py")), None)
    if script is None:
        return ""
    own = [text for text in (*rest, *texts) if text != script and (text.startswith("-") or "=" not in text)]
    ours = [word for word in words if word not in own]
    theirs = [word for word in words if word in own]
    return f"\nArguments for a script of yours come after `--`:\n    toolkit {shlex.join([*ours, '--', *theirs])}"
