"""print the script by which a shell completes commands and keys

Put the line of your shell into its start-up file: ~/.bashrc, ~/.zshrc or
~/.config/fish/config.fish.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import registry
from toolkit.base import fsio

if TYPE_CHECKING:  # imported where a script is on the line
    from toolkit.config.script_keys import ActingKeys, Option

EXAMPLES = (
    ("toolkit completion bash", 'for ~/.bashrc: eval "$(toolkit completion bash)"'),
    ("toolkit completion zsh", 'for ~/.zshrc: eval "$(toolkit completion zsh)"'),
    ("toolkit completion fish", "for config.fish: toolkit completion fish | source"),
)

#: The most runs that are offered, the newest first.
MOST_RUNS = 200

SCRIPTS = {
    "bash": """_toolkit() {
    local IFS=$'\\n'
    COMPREPLY=($(toolkit __complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _toolkit toolkit
""",
    "zsh": """#compdef toolkit
_toolkit() {
    local -a found
    found=("${(@f)$(toolkit __complete zsh "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    found=(${found:#})
    compadd -Q -- ${found:#*[=/]}
    compadd -Q -S '' -- ${(M)found:#*[=/]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _toolkit toolkit
""",
    "fish": """complete --command toolkit --no-files --arguments '(toolkit __complete fish (commandline -cp))'
""",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=[*SCRIPTS])


def run(args: Namespace) -> None:
    print(SCRIPTS[args.shell], end="")


# The script calls `toolkit __complete SHELL LINE` at each press of the tab key, so this loads as little as it can: one
# command's module, and no config. The config's keys are kept in the user's cache folder, for this version.


def main(argv: Sequence[str]) -> int:
    """Print the words that may stand at the end of a shell's line. After an error print nothing."""
    shell, line = (*argv, "", "")[:2]
    try:
        for found in complete(line):
            # bash takes = for the end of a word: it wants only what comes after it.
            last = _words(line)[-1]
            print(found[last.rfind("=") + 1 :] if shell == "bash" and "=" in last else found)
    except Exception:
        return 1
    return 0


def complete(line: str) -> list[str]:
    """Return the words that may replace the last word of ``line``."""
    words = _words(line)[1:]
    from toolkit.cli.main import commands

    if len(words) < 2:
        return [name for name in commands() if name.startswith("".join(words))]
    if registry.where("commands", words[0]) is None:
        return []
    # Behind `--` are the words of a script.
    found = [option.flag for option in _options(_acting(words))] if "--" in words[:-1] else _offered(words)
    offered = dict.fromkeys(word for word in found if word.startswith(words[-1]))
    # Names by the alphabet, then run ids.
    return sorted(offered, key=lambda word: (word[:8].isdigit(), word))


def _words(line: str) -> list[str]:
    """Return the words of a line, as a shell splits it. The last may be empty, or lack its closing quote."""
    for ending in ("", "'", '"'):
        try:
            words = shlex.split(line + ending)
        except ValueError:
            continue
        return [*words, ""] if not words or (line[-1:].isspace() and not ending) else words
    return [""]


def _offered(words: Sequence[str]) -> Iterable[str]:
    """Return the words that fit the last place: options, or values of one, or arguments."""
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    registry.find("commands", words[0]).add_arguments(parser)
    last, before = words[-1], words[-2]
    options = {name: action for action in parser._actions for name in action.option_strings}
    if before in options and options[before].nargs != 0:
        return _values(options[before], words)
    if last.startswith("-"):
        return [name for name, action in options.items() if action.help is not argparse.SUPPRESS]
    # The arguments so far, without options and their values.
    given = [
        word
        for place, word in enumerate(words[1:-1], 1)
        if not word.startswith("-")
        and not (words[place - 1] in options and options[words[place - 1]].nargs != 0 and place > 1)
    ]
    places = [action for action in parser._actions if not action.option_strings]
    if not places:
        return ()
    # `sweep status NAME`: what is no file is a verb, and the name of a sweep follows.
    if words[0] == "sweep" and given and "." not in given[0] and "/" not in given[0]:
        from toolkit.files import rundir

        return _listed(rundir.runs_root() / rundir.SWEEPS)
    # The last argument may be repeated: it takes all further words.
    return _values(places[min(len(given), len(places) - 1)], words)


def _values(action: argparse.Action, words: Sequence[str]) -> Iterable[str]:
    """Return the values that an option or argument at the last place takes, as far as they are known."""
    begun = words[-1]
    if action.choices is not None:
        return map(str, action.choices)
    # All commands use the same metavar for the same kind of value.
    match action.metavar if isinstance(action.metavar, str) else action.dest:
        case "RUN":
            return _runs(begun)
        case "CONFIG":
            return _files(begun, (".yaml", ".yml", ".py"))
        case "key=value" | "[CONFIG] [key=value]":
            return _settings(begun, _acting(words))
        case "STATE":
            from toolkit.cli import selection

            return selection.STATES
        case "executor":
            return ("auto", "slurm", "local", "debug")
        case "PATH" | "FILE" | "FOLDER" | "root":
            return _files(begun, ("",))
    return ()


def _runs(begun: str) -> list[str]:
    """Return names of configs and run ids. Only folders are listed: no file of 10,000 runs is looked at."""
    from toolkit.files import rundir

    root = rundir.runs_root()
    names = [name for name in _listed(root) if not name.startswith(".")]
    ids = sorted((run for name in names for run in _listed(root / name) if run.startswith(begun)), reverse=True)
    return [*names, *ids[:MOST_RUNS]]


def _listed(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _files(begun: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the folders that ``begun`` may mean, and the files with one of the endings."""
    head = begun[: begun.rfind("/") + 1]
    try:
        with os.scandir(os.path.expanduser(head) or ".") as entries:  # noqa: PTH111
            for entry in entries:
                if entry.name.startswith(".") and not begun[len(head) :].startswith("."):
                    continue
                if entry.is_dir():
                    yield f"{head}{entry.name}/"
                elif entry.name.endswith(endings):
                    yield head + entry.name
    except OSError:
        return


def _settings(begun: str, acting: ActingKeys | None) -> list[str]:
    """Return ``key=``, on a script for each that acts on it. After ``key=`` return ``key=value`` for known values."""
    keys = _keys()
    key, sign, _ = begun.partition("=")
    if sign:
        return [f"{key}={value}" for value in keys.get(key, ())]
    own = [f"args.{option.name}=" for option in _options(acting)]
    return [*own, *(f"{name}=" for name in keys if acting is None or acting.has_effect(name))]


def _acting(words: Sequence[str]) -> ActingKeys | None:
    """Return the keys that act on the script among the words; None without one. That of `exec` is behind ``--``."""
    end = words.index("--") if "--" in words else len(words) - 1
    script = next((word for word in words[1:end] if word.endswith(".py")), None)
    if script is None and words[0] != "exec":
        return None
    from toolkit.config.schema import SCRIPT_JOB
    from toolkit.config.script_keys import acting_keys

    return acting_keys(SCRIPT_JOB, words[end + 1 :]) if script is None else acting_keys(script, ())


def _options(acting: ActingKeys | None) -> Sequence[Option]:
    return () if acting is None else acting.options


def _keys() -> dict[str, list[str]]:
    """Return the keys of every config, each with the words that it takes."""
    from toolkit import __version__
    from toolkit.base.trust import cache_dir

    folder = cache_dir()
    # The time of the newest source: in a checkout the keys change while the version stays.
    sources = Path(registry.__file__).with_name("config").glob("*.py")
    newest = max(source.stat().st_mtime_ns for source in sources)
    path = folder and folder / f"keys-{__version__}-{newest}.json"
    try:
        found: dict[str, list[str]] = json.loads(fsio.read_bytes(path)) if path else {}
        if found and all(isinstance(words, list) for words in found.values()):
            return found
    except (OSError, ValueError, AttributeError):
        pass
    # Without a usable cache file the keys are read from the sources, which takes longer.
    from toolkit.cli.keys import words_by_key

    found = words_by_key()
    if path:
        fsio.write_json(path, found, durable=False)
    return found
