"""How a script ended, as the run learns it that the script has started."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolkit.run.rank import script_end

START = """
import os, sys
from toolkit.run.rank import script_end

def end(error):
    print("ended by", type(error).__name__, error, flush=True)
    {in_end}

def main():
    script_end.call_at_end(end)
    return 0

if __name__ == "__main__":
    {script}
"""
#: The script's last lines, its exit code, and what the run is told.
ENDS = [
    ("main()", 0, "NoneType None"),
    ("main(); sys.exit()", 0, "NoneType None"),
    ("main(); sys.exit(3)", 3, "SystemExit 3"),
    ("main(); sys.exit('why')", 1, "SystemExit why"),
    ("main(); 1 / 0", 1, "ZeroDivisionError division by zero"),
    ("main(); exec('try: sys.exit(3)\\nexcept SystemExit: pass')", 0, "NoneType None"),
    ("main(); os.fork() or sys.exit(3); os.wait()", 0, "NoneType None"),
    # Their codes cannot be read. In the first one sys.exit is looked up before main() is called.
    ("sys.exit(main())", 0, "UnseenExit "),
    ("raise SystemExit(main())", 0, "UnseenExit "),
    ("main(); exit(4)", 4, "UnseenExit "),
]


def outcome(tmp_path: Path, script: str, in_end: str = "") -> tuple[int, list[str]]:
    path = tmp_path / "script.py"
    path.write_text(START.format(script=script, in_end=in_end))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout.splitlines() + done.stderr.splitlines()


@pytest.mark.parametrize(("script", "code", "told"), ENDS, ids=[each[0] for each in ENDS])
def test_a_script_without_a_block_tells_its_run_once_how_it_ended(
    tmp_path: Path, script: str, code: int, told: str
) -> None:
    returned, lines = outcome(tmp_path, script)
    assert (returned, [line for line in lines if line.startswith("ended by")]) == (code, [f"ended by {told}"])


@pytest.mark.parametrize("script", ["main()", "main(); 1 / 0"])
def test_a_stop_at_the_end_is_the_exit_code(tmp_path: Path, script: str) -> None:
    assert outcome(tmp_path, script, "raise SystemExit(75) from None")[0] == 75


def test_an_end_that_fails_fails_the_script(tmp_path: Path) -> None:
    code, lines = outcome(tmp_path, "main()", "raise OSError('the disk is full')")
    assert (code, lines[-1]) == (1, "OSError: the disk is full")


@pytest.mark.parametrize(
    ("error", "told"), [(None, None), (SystemExit(0), None), (SystemExit(2), "SystemExit"), (KeyError(), "KeyError")]
)
def test_a_script_within_a_rank_ends_its_run_before_the_rank_ends(
    error: BaseException | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str | None] = []
    hooks = sys.exit, sys.excepthook
    # An interpreter that ends is told only once of a run, and this one is the tests'.
    monkeypatch.setattr(threading, "_register_atexit", lambda call: None)

    def run() -> None:
        with script_end.end_runs_on_exit():
            script_end.call_at_end(lambda error: ends.append(type(error).__name__ if error else None))
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert ends == [told]
    assert (sys.exit, sys.excepthook) == hooks
