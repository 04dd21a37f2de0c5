"""Each command's help has examples that can be typed, and fits into a terminal."""

from __future__ import annotations

import shlex
from importlib import import_module

import pytest

from toolkit.cli import main as cli
from toolkit.cli.main import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_that_parse_and_are_in_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = import_module(f"toolkit.cli.commands.{name.replace('-', '_')}").EXAMPLES
    assert examples
    parser = cli.build_parser()
    with pytest.raises(SystemExit) as left:
        cli.parse(parser, [name, "--help"])
    assert left.value.code == 0
    page = capsys.readouterr().out
    for line, what in examples:
        program, command, *_ = words = shlex.split(line)
        assert (program, command) == ("toolkit", name)
        args = cli.parse(parser, words[1:])
        assert args.command == name
        assert line in page
        assert what in page
        assert len(what) <= 72
