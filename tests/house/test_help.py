"""Each command's help has examples that can be typed, and fits into a terminal."""

import argparse
import contextlib
import re
import shlex
import subprocess
import sys

import pytest

from toolkit import registry
from toolkit.base.errors import EXIT_REQUEST
from toolkit.cli import main as cli


@pytest.mark.parametrize("name", cli.commands())
def test_each_command_has_examples_that_parse_and_are_in_its_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    examples = registry.find("commands", name).EXAMPLES
    assert examples
    about = registry.find("commands", name).__doc__ or ""
    assert not re.match(r"(an?|the|one|how|what|\w+'s)\b", about), f"begin with a verb: {about}"
    parser = cli.build_parser()
    with pytest.raises(SystemExit) as left:
        cli.parse(parser, [name, "--help"])
    assert left.value.code == 0
    page = capsys.readouterr().out
    assert [line for line in page.splitlines() if len(line) > 80] == []
    for line, what in examples:
        program, command, *_ = words = shlex.split(line)
        assert (program, command) == ("toolkit", name)
        args = cli.parse(parser, words[1:])
        assert args.command == name
        assert line in page
        assert what in page
        assert len(what) <= 72


def test_an_unknown_command_is_answered_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submitt", "x.yaml"]) == EXIT_REQUEST
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        said.err
        == "toolkit: error: unknown command 'submitt'; did you mean 'submit'? `toolkit --help` lists the commands\n"
    )


def test_an_unknown_data_set_is_refused_without_torch() -> None:
    code = "import sys; from toolkit.cli import main as cli; "
    code += "print(cli.main(['data', 'fetch', 'nosuch']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(EXIT_REQUEST), "False"]
    assert "unknown data set 'nosuch'" in done.stderr


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.suppress(SystemExit):
        cli.main(words)
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_list_of_commands_fits_80_columns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(words, capsys)
    assert page.startswith("usage: toolkit")
    assert [line for line in page.splitlines() if len(line) > 80] == []


def verbs() -> list[tuple[str, str]]:
    """Return each command with words to choose from as its first argument, and each of these words."""
    found = []
    for name in cli.commands():
        parser = cli.build_parser((name,))
        (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        first = next((each for each in action.choices[name]._actions if not each.option_strings), None)
        found += [(name, str(word)) for word in (first and first.choices) or ()]
    return found + [("sweep", word) for word in ("status", "retry", "stop", "best", "export")]


WRONG = [(name, word, [name, word[0] + word, "x"]) for name, word in verbs()]
WRONG += [("", name, [name[0] + name]) for name in cli.commands()]


@pytest.mark.parametrize(("command", "right", "words"), WRONG, ids=lambda each: str(each))
def test_a_mistyped_word_is_answered_with_the_nearest(
    command: str, right: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"did you mean '{right}'?" in printed(words, capsys)


@pytest.mark.parametrize("name", cli.commands())
def test_a_mistyped_option_is_answered_with_the_nearest_and_the_commands_own_usage(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {*re.findall(r"^  (--[a-z-]{5,})", printed([name, "--help"], capsys), re.MULTILINE)}
    for option in sorted(options)[:1]:
        said = printed([name, "status", "x", "y", f"{option}x"], capsys)
        assert said.startswith(f"usage: toolkit {name}")
        # A word before it may be wrong as well, and is told first.
        assert f"did you mean '{option}'?" in said or "unrecognized" not in said
