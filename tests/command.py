"""`toolkit` in the process of a test, with the exit code that the test expects."""

import pytest
from _pytest.capture import CaptureResult

from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.cli import main as cli


class Command:
    """Runs `toolkit`, and returns what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> str:
        """Return the output of a command that succeeds."""
        return self.ends(EXIT_DONE, *words).out

    def refuses(self, *words: str) -> str:
        """Return the errors of a command that is a wrong request."""
        return self.ends(EXIT_REQUEST, *words).err

    def ends(self, code: int, *words: str) -> CaptureResult[str]:
        """Return the output and the errors of a command that ends with an exit code."""
        self._capsys.readouterr()  # what the test has printed so far
        try:
            ended: object = cli.main([*words])
        except SystemExit as error:  # of argparse
            ended = error.code
        printed = self._capsys.readouterr()
        assert ended == code, printed.err or printed.out
        return printed


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
