"""`toolkit exec ... -- CMD ...`: which words are the toolkit's, which the command's, and what the launcher gets."""

from typing import Any

import pytest

from tests.command import Command
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import follow
from toolkit.cli import main as cli
from toolkit.config import JobConfig
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.run.attempt import advice
from toolkit.run.submission import submit

Call = tuple[str, list[str], list[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return what the launcher is asked for: where, the command, the overrides and the rest."""
    seen: list[Call] = []

    def record(where: str) -> Any:
        return lambda words, overrides, **options: seen.append((where, list(words), list(overrides), options))

    monkeypatch.setattr(submit, "submit_command", record("submit"))
    monkeypatch.setattr(submit, "supervise_command", record("here"))
    monkeypatch.setattr(follow, "announce", lambda run, as_json: None)
    monkeypatch.setattr(follow, "to_the_end", lambda run, bar: 7 if bar else 5)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return seen


@pytest.mark.parametrize(
    ("argv", "command", "overrides", "name"),
    [
        (["--", "python", "train.py"], ["python", "train.py"], [], None),
        (
            ["cluster.nodes=2", "--", "python", "t.py", "--lr=1"],
            ["python", "t.py", "--lr=1"],
            ["cluster.nodes=2"],
            None,
        ),
        (["a=1", "--name", "n", "b=2", "--", "x"], ["x"], ["a=1", "b=2"], "n"),
        (["--name=n", "a=1", "--", "x", "--name", "m", "c=3"], ["x", "--name", "m", "c=3"], ["a=1"], "n"),
        (["--", "sh", "-c", "exec x -- y", "--", "z"], ["sh", "-c", "exec x -- y", "--", "z"], [], None),
        (["--", "--wait"], ["--wait"], [], None),
        (["--restart-args", "--resume", "--name", "n", "--", "x"], ["x"], ['restart_args=["--resume"]'], "n"),
        (["--", "x", "", "it's"], ["x", "", "it's"], [], None),
    ],
)
def test_what_follows_the_two_dashes_is_the_commands_word_for_word(
    calls: list[Call], argv: list[str], command: list[str], overrides: list[str], name: str | None
) -> None:
    assert cli.main(["exec", *argv]) == EXIT_DONE
    assert calls == [("submit", command, overrides, {"name": name, "executor": "auto", "after": []})]


@pytest.mark.parametrize(("option", "code"), [("--wait", 5), ("--follow", 7)])
def test_who_waits_gets_the_commands_exit_code(calls: list[Call], option: str, code: int) -> None:
    assert cli.main(["exec", option, "--", "x"]) == code
    assert cli.main(["exec", "a=1", option, "b=2", "--", "x"]) == code
    assert calls[-1][2] == ["a=1", "b=2"]


def test_inside_a_job_it_runs_right_here(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert cli.main(["exec", "retry.max_failures=0", "--name", "n", "--", "x", "-v"]) == EXIT_DONE
    assert calls == [("here", ["x", "-v"], ["retry.max_failures=0"], {"name": "n"})]


def test_inside_a_job_it_cannot_wait_for_another_run(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert "--after: inside a job the script starts right here" in command.refuses("exec", "--after", "gpt", "--", "x")
    command("exec", "--after", "gpt", "--executor=slurm", "--", "x")
    assert calls == [("submit", ["x"], [], {"name": None, "executor": "slurm", "after": ["gpt"]})]


@pytest.mark.parametrize("argv", [[], ["--"], ["cluster.nodes=2"], ["python", "train.py"]])
def test_without_a_command_it_says_where_the_command_goes(calls: list[Call], argv: list[str], command: Command) -> None:
    (line,) = command.refuses("exec", *argv).splitlines()
    assert "the command is missing; give it after `--`: toolkit exec cluster.nodes=2 -- python train.py" in line
    assert calls == []


def test_an_option_of_the_commands_before_the_dashes_is_named(calls: list[Call], command: Command) -> None:
    err = command.refuses("exec", "--nproc=2", "a=1", "--", "python", "--lr=1")
    assert err.splitlines()[-1].endswith("unrecognized arguments: --nproc=2")
    assert calls == []


def test_two_dashes_after_another_command_are_not_taken_for_exec(calls: list[Call]) -> None:
    args = cli.parse(cli.build_parser(), ["submit", "exec", "--", "a=1"])
    assert (args.config, args.overrides, args.words) == ("exec", ['argv=["a=1"]'], ["a=1"])
    args = cli.parse(cli.build_parser(), ["stop", "--", "exec"])
    assert (args.run, args.words) == ("exec", [])


@pytest.mark.parametrize(
    ("config", "attempt", "steps", "is_said"),
    [
        (JobConfig(job=configs.SCRIPT_JOB, argv=["python", "train.py"]), 2, None, True),
        (JobConfig(job=configs.SCRIPT_JOB, argv=["python", "train.py"]), 1, None, False),
        (JobConfig(job=configs.SCRIPT_JOB, argv=["python", "train.py"]), 2, 7, False),  # it has our checkpoints
        (JobConfig(job=configs.SCRIPT_JOB, argv=["python", "train.py"], restart_args=["--resume"]), 2, None, False),
        (JobConfig(job=configs.SCRIPT_JOB, argv=["sh", "-c", "x $TOOLKIT_ATTEMPT"]), 3, None, False),
        (JobConfig(job="jobs.classify"), 2, None, False),
    ],
)
def test_only_of_a_script_that_nobody_tells_it_is_said_that_it_may_begin_anew(
    run: RunDir, config: JobConfig, attempt: int, steps: int | None, is_said: bool
) -> None:
    fsio.write_atomic(run.config, configs.dump_config(config))
    run.add_attempt(AttemptRecord(1, ("n",), 1.0, 2.0, "crashed", "restart", step_end=steps))
    assert bool(advice.restart_note(run, attempt)) == is_said
