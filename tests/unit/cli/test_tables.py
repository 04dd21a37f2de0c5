"""Tables fit their width, and a state has the colour of its meaning."""

import os
import pty
import subprocess
import sys
from typing import Any

import pytest
from rich.cells import cell_len

from toolkit.cli import columns
from toolkit.cli.tables import Table, short

HEAD = ("RUN", "NAME", "STATE", "STEP", "NOTE")
ROWS = [
    ("5ff3584a", "mnist", "failed", "120/9000", "rank 3 on node7: ValueError: a long story\nof two lines " + "x" * 60),
    ("68ffbb30", "a-name-of-many-words-that-takes-fifty-characters-of-it", "running? (silent)", "7/9000", ""),
]


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_every_line_fits_and_what_is_cut_says_so(width: int) -> None:
    table = Table([HEAD, *ROWS], width, ("STEP",))
    assert max(map(len, table.lines)) <= width
    assert table.is_truncated
    assert "..." in table.lines[1]
    assert [line.split()[0] for line in table.lines] == ["RUN", "5ff3584a", "68ffbb30"]
    assert ("STEP" in table.lines[0]) == (width > 80)


def test_without_a_width_everything_is_there_in_one_line_a_row() -> None:
    table = Table([HEAD, *ROWS], None, ("STEP",))
    assert not table.is_truncated
    assert len(table.lines) == 3
    assert table.lines[1].endswith("a long story of two lines " + "x" * 60)


def test_a_narrow_terminal_goes_without_each_usual_column_but_two() -> None:
    others = {*columns.USUAL} - {"run", "state"}
    assert others == {*columns._DISPENSABLE}, "place it in _DISPENSABLE of toolkit/cli/columns.py as well"


def test_names_in_the_first_column_are_not_cut() -> None:
    name = "train/data_wait_fraction"
    rows = [("", "FIRST", "SECOND"), (name, "0.123456789012345", "a text that is longer than the name")]
    assert name not in str(Table(rows, 50))
    assert all(len(line) <= 50 for line in Table(rows, 50, is_named=True).lines)
    assert name in str(Table(rows, 50, is_named=True))


def test_a_column_without_a_text_takes_no_room() -> None:
    assert Table([("RUN", "LOSS", "STATE"), ("a", "", "queued")], 80).lines == ["RUN  STATE", "a    queued"]
    assert Table([("RUN", "LOSS")], 80).lines == ["RUN  LOSS"]


def test_wide_characters_count_as_a_terminal_shows_them() -> None:
    table = Table([("RUN", "NOTE", "STATE"), ("a", "模型训练失败了" * 9, "failed"), ("b", "plain", "queued")], 40)
    assert [cell_len(line) <= 40 for line in table.lines] == [True] * 3
    # The column after it begins at the same place in each line.
    begins = {cell_len(line[: line.index(word)]) for line, word in zip(table.lines, HEAD_WORDS, strict=True)}
    assert len(begins) == 1


HEAD_WORDS = ("STATE", "failed", "queued")


def test_a_text_with_commands_to_the_terminal_is_shown_and_counted_as_escapes() -> None:
    (_, line) = Table([("RUN", "NOTE"), ("a", "\x1b[2J" * 30)], 40).lines
    assert line.isprintable()
    assert len(line) <= 40


def test_no_command_is_cut_in_half() -> None:
    (_, line) = Table([("RUN", "NOTE"), ("a", "3 completed; `toolkit sweep status rates` lists them")], 40).lines
    assert line == "a    3 completed; ..."


def test_a_run_id_has_a_short_form_and_other_names_stay() -> None:
    assert short("20261128-070825-5ff3584a") == "5ff3584a"
    assert short("lr-and-batch") == "lr-and-batch"


_PRINTS = """
from toolkit.cli.tables import Table
Table([("RUN", "STATE", "NOTE"), *((str(n), s, "x") for n, s in enumerate(
    ["running", "queued (PENDING, Priority)", "completed", "lost (FAILED)", "stopped"]))]).print()
"""


def on_terminal(**env: str) -> str:
    main, side = pty.openpty()
    environ: dict[str, Any] = {**os.environ, "TERM": "xterm", **env}
    with subprocess.Popen([sys.executable, "-c", _PRINTS], stdout=side, env=environ):
        os.close(side)
        seen = b""
        try:
            while data := os.read(main, 4096):
                seen += data
        except OSError:  # the other side is closed
            pass
        os.close(main)
    return seen.decode().replace("\r\n", "\n")


def test_states_are_coloured_by_their_meaning_on_a_terminal_only() -> None:
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    lines = on_terminal(NO_COLOR="").splitlines()
    codes = ("36", "33", "32", "31")
    states = ("running", "queued (PENDING, Priority)", "completed", "lost (FAILED)")
    for code, state, line in zip(codes, states, lines[1:], strict=False):
        assert f"\x1b[{code}m{state}" in line
        assert line.endswith("\x1b[0m  x")
    assert "\x1b" not in lines[5], "a run that a user has ended is neither good nor bad"
    plain = subprocess.run([sys.executable, "-c", _PRINTS], env=env, text=True, capture_output=True, check=True).stdout
    assert "\x1b" not in plain
    assert on_terminal(NO_COLOR="1") == on_terminal(TERM="dumb") == plain
