"""Each command's help has examples that can be typed, and fits into a terminal."""

from __future__ import annotations

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
        said.err == "toolkit: error: no command 'submitt'; did you mean 'submit'? `toolkit --help` lists the commands\n"
    )


def test_an_unknown_data_set_is_refused_without_torch() -> None:
    code = "import sys; from toolkit.cli import main as cli; "
    code += "print(cli.main(['data', 'fetch', 'nosuch']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(EXIT_REQUEST), "False"]
    assert "no data set 'nosuch'" in done.stderr
