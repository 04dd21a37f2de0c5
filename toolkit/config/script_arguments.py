"""The command line of a script: the words after ``--``, and options by name, such as ``args.epochs=3``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from toolkit.config.references import escaped
from toolkit.config.schema import Argument, JobConfig

#: Among the words of ``on_restart``, stands for the newest file that matches the pattern.
NEWEST = re.compile(r"\{newest:([^{}]+)\}")


def command_line(config: JobConfig) -> list[str]:
    """Return the words that a script finds in ``sys.argv[1:]``; of `toolkit exec` the whole command."""
    return with_options(config.argv, config.args)


def with_options(words: Sequence[str], options: Mapping[str, Argument]) -> list[str]:
    """Return ``words`` with each option set: where it is among them, else behind them.

    ``{"epochs": 3}`` is ``--epochs 3``, and ``{"e": 3}`` is ``-e 3``. True is the option alone, and False leaves it
    out. A list is the option with several words. Behind a ``--`` among the words there are no options::

        >>> with_options(["fit", "--epochs=3", "data"], {"epochs": 5, "amp": True})
        ['fit', '--epochs', '5', 'data', '--amp']
    """
    line = list(words)
    for name, value in options.items():
        flag = flag_of(name)
        last = line.index("--") if "--" in line else len(line)
        begin = next((at for at, word in enumerate(line[:last]) if word.partition("=")[0] == flag), last)
        end = begin
        if begin < last:
            end += 1
            is_joined = "=" in line[begin]
            # The words behind an option are its own as far as the new value says that it takes some.
            most = 0 if is_joined or isinstance(value, bool) else last if isinstance(value, list) else end + 1
            while end < min(last, most) and not _is_option(line[end]):
                end += 1
        line[begin:end] = _option(flag, value)
    return line


def named(words: Sequence[str]) -> set[str]:
    """Return the names of the options among ``words``."""
    return {word.partition("=")[0].lstrip("-") for word in words if _is_option(word)}


def argv_override(words: Sequence[str], key: str = "argv") -> str:
    """Return the words after ``--`` as a ``key=value`` argument of a config."""
    return f"{key}={json.dumps(escaped(list(words)), ensure_ascii=False)}"


def flag_of(name: str) -> str:
    """Return the option that ``args.NAME`` sets."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _option(flag: str, value: Argument) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    # A parser takes a separate word with a dash for the next option.
    return [f"{flag}={words[0]}"] if len(words) == 1 and _is_option(words[0]) else [flag, *words]


def _is_option(word: str) -> bool:
    """True for ``--epochs`` and ``-e``; a negative number is a value."""
    return word.startswith("-") and word != "-" and not re.match(r"-\.?\d", word)
