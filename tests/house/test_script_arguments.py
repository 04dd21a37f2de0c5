"""The arguments of a user's script, from the command line to ``sys.argv``: submit, sweep, resume, and a rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from toolkit import config as configs
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.cli import main as cli
from toolkit.cli.run_rows import given_words
from toolkit.files import rundir
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.nodes.start import user_script
from toolkit.plugins.sweep import request, submission
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.submission import executors, submit
from toolkit.run.submission.handle import Run

#: A loop by its text, which a rank of this test ends before it would import torch.
LOOP = """
import json, sys
json.dump(sys.argv[1:], open("argv.json", "w"))
sys.exit(0)
import toolkit
with toolkit.start() as run:
    pass
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("{}")
    Path("loop.py").write_text(LOOP)
    Path("plain.py").write_text("import sys\nprint(sys.argv)\n")
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **_: Run(run, executor, "1"))
    return tmp_path / "project"


def toolkit(*argv: str) -> RunDir:
    """Return the run that a command has made, or else the first one."""
    before = rundir.all_runs()
    assert cli.main([*argv]) == EXIT_DONE
    return next((run for run in rundir.all_runs() if run not in before), *before[:1])


def words_of(run: RunDir) -> list[str]:
    return configs.command_line(configs.load_config(run.config, site=False))


def test_the_words_after_the_dashes_are_those_of_the_script() -> None:
    run = toolkit(
        "submit", "loop.py", "--executor", "local", "args.lr=1e-3", "--", "fit", "--epochs", "3", "a=b", "--wait"
    )
    assert words_of(run) == ["fit", "--epochs", "3", "a=b", "--wait", "--lr", "1e-3"]
    assert given_words(run) == "arguments: fit --epochs 3 a=b --wait --lr 1e-3"


def test_a_script_that_knows_nothing_of_us_gets_them_too(project: Path) -> None:
    run = toolkit("submit", "plain.py", "--executor", "local", "--", "--epochs", "3")
    assert user_script.read_command(run) == [sys.executable, str(project / "plain.py"), "--epochs", "3"]
    assert given_words(run) == f"command: {sys.executable} {project / 'plain.py'} --epochs 3"
    run = toolkit("exec", "--executor", "local", "args.epochs=5", "--", "python", "plain.py", "--epochs", "3")
    assert user_script.read_command(run) == ["python", "plain.py", "--epochs", "5"]


def test_python_code_gives_them_as_a_list() -> None:
    run = submit.submit("loop.py", ["args.lr=0.5"], args=["--epochs", 3, "--lr", 0.1], executor="local")
    assert words_of(run.dir) == ["--epochs", "3", "--lr", "0.5"]


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("submit loop.py --epochs 3", "toolkit submit loop.py -- --epochs 3"),
        (
            "submit loop.py train.seed=1 --wait --lr=0.1 --amp x",
            "toolkit submit loop.py train.seed=1 --wait -- --lr=0.1 --amp x",
        ),
        ("submit --epochs 3 loop.py", "toolkit submit loop.py -- --epochs 3"),
        ("sweep loop.py optim.lr=1,2 --epochs 3", "toolkit sweep loop.py optim.lr=1,2 -- --epochs 3"),
        ("run loop.py --epochs 3", "toolkit run loop.py -- --epochs 3"),
        ("resume-check loop.py --epochs 3", "toolkit resume-check loop.py -- --epochs 3"),
        ("resume loop --epochs 3", "toolkit resume loop -- --epochs 3"),
    ],
)
def test_options_of_the_script_before_the_dashes_are_answered_by_the_line_to_write(
    argv: str, advice: str, command: Command
) -> None:
    assert f"\n    {advice}\n" in command.refuses(*argv.split())
    args = cli.parse(cli.build_parser(), advice.split()[1:])  # what it says can be written
    assert args.words == advice.partition(" -- ")[2].split()


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("submit loop.py --nodes 2", "toolkit submit loop.py cluster.nodes=2"),
        (
            "submit loop.py -N 2-4 -p gpu --wait",
            "toolkit submit loop.py cluster.extra.nodes=2-4 cluster.partition=gpu --wait",
        ),
        (
            "exec --time=1:00:00 --mem 4G -- python x.py",
            "toolkit exec cluster.time_min=60 cluster.mem_gb=4 -- python x.py",
        ),
        ("exec --mem=512 --exclusive -- x", "toolkit exec cluster.mem_gb=0.5 cluster.exclusive=true -- x"),
        ("sweep loop.py --mail-type FAIL a=1,2", "toolkit sweep loop.py cluster.extra.mail-type=FAIL a=1,2"),
        (
            "resume x --ntasks=4 --exclusive=user",
            "toolkit resume x cluster.extra.exclusive=user\n--ntasks: use cluster.n",
        ),
        ("submit own.py --nodes 2", "toolkit submit own.py -- --nodes 2"),
    ],
)
def test_options_of_sbatch_are_answered_by_their_keys(argv: str, advice: str, command: Command) -> None:
    Path("own.py").write_text("import argparse\nargparse.ArgumentParser().add_argument('--nodes')\n")
    assert f"\n    {advice}" in command.refuses(*argv.split())


def test_a_resume_keeps_the_arguments_and_may_change_one(command: Command) -> None:
    run = toolkit("submit", "loop.py", "--executor", "local", "--", "--epochs", "3", "--amp")
    ended = RunResult.from_json({"state": "completed", "why": ""})
    run.write_result(ended)
    assert "train.epochs: loop.py does not read it" in command.refuses("resume", run.id, "train.epochs=20")
    assert f"`toolkit resume {run.id} args.NAME=VALUE` continues" in command.refuses("resume", run.id, "train.seed=1")
    toolkit("resume", run.id, "args.epochs=5")
    assert words_of(run) == ["--epochs", "5", "--amp"]
    run.write_result(ended)
    toolkit("resume", run.id, "--", "--epochs", "7")
    assert words_of(run) == ["--epochs", "7"]
    run.write_result(RunResult.from_json({"state": "stopped", "why": ""}))
    toolkit("resume", run.id)
    assert words_of(run) == ["--epochs", "7"]


def test_a_resumed_command_changes_by_option_only(command: Command) -> None:
    run = toolkit("submit", "plain.py", "--executor", "local", "--", "--epochs", "3")
    run.write_result(RunResult.from_json({"state": "failed", "why": ""}))
    assert "args.NAME=VALUE changes an option of it" in command.refuses("resume", run.id, "--", "--epochs", "5")
    toolkit("resume", run.id, "args.epochs=5")
    assert user_script.read_command(run)[2:] == ["--epochs", "5"]


@pytest.mark.parametrize("script", ["loop.py", "plain.py"])
def test_arguments_are_swept(script: str) -> None:
    asked = request.read(script, [configs.argv_override(["--amp"]), "args.epochs=1,2", "args.lr=0.10,1e-4"], Options())
    sent = submission.submit(asked, Path.cwd(), "slurm", FakeSlurm())
    assert [point.values["args.epochs"] for point in sent.points] == [1, 1, 2, 2]
    given = [" ".join(words_of(sent.sweep.run_of(point))) for point in sent.sweep.points()]
    start = "" if script == "loop.py" else f"{sys.executable} {Path.cwd() / script} "
    assert given == [f"{start}--amp --epochs {epochs} --lr {lr}" for epochs in (1, 2) for lr in ("0.10", "1e-4")]


def test_a_rank_finds_them_in_its_argv(project: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "toolkit", "run", "loop.py", "args.lr=2", "--", "--epochs", "3", "it's"]
    done = subprocess.run(command, env=environ, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((project / "argv.json").read_text()) == ["--epochs", "3", "it's", "--lr", "2"]


def test_a_script_that_is_not_there_is_refused_before_it_is_queued(command: Command) -> None:
    err = command.refuses("exec", "--executor", "local", "--", "python3", "-u", "plane.py")
    assert f"plane.py: there is no such file in {Path.cwd()}; did you mean 'plain.py'?" in err
    assert rundir.all_runs() == []


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-m", "x.py"],
        ["python", "-c", "pass", "x.py"],
        ["python", "-W", "ignore", "x.py"],
        ["sh", "x.py"],
        ["python", "plain.py", "x.py"],
        ["python", "/folder/of/the/nodes/x.py"],
    ],
)
def test_a_script_that_may_well_be_there_is_not_refused(words: list[str]) -> None:
    toolkit("exec", "--executor", "local", "--", *words)


def test_a_script_that_a_setup_may_bring_is_not_refused() -> None:
    toolkit("exec", "--executor", "local", "cluster.setup=[touch plane.py]", "--", "python", "plane.py")


def test_a_restarted_command_gets_the_newest_checkpoint_of_its_own(project: Path) -> None:
    Path("plain.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    words = ["--restart-args", "--resume {newest:ckpt/*.pt} --mode=again '${HOME} {}'"]
    run = toolkit("exec", "--executor", "local", *words, "--", sys.executable, "plain.py", "--lr", "2")

    def argv(attempt: int) -> tuple[list[str], str]:
        command = [sys.executable, "-m", "toolkit.nodes.start.user_script", str(run.config)]
        environ = {**os.environ, "TOOLKIT_ATTEMPT": str(attempt), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        done = subprocess.run(command, env=environ, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    assert argv(2)[0] == ["--lr", "2"]
    assert "no file matches ckpt/*.pt: restarted without --restart-args" in argv(2)[1]
    Path("ckpt").mkdir()
    for age, name in ((9, "b"), (5, "a"), (7, "c")):
        Path(f"ckpt/{name}.pt").touch()
        os.utime(f"ckpt/{name}.pt", (1e9 - age, 1e9 - age))
    assert argv(1)[0] == ["--lr", "2"]
    assert argv(2)[0] == ["--lr", "2", "--resume", "ckpt/a.pt", "--mode=again", "${HOME} {}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["exec", "--restart-args", "--resume 'a", "--", "python", "plain.py"],
            "--restart-args: --resume 'a: No closing",
        ),
        (["exec", "--restart-args", "{newest}", "--", "python", "plain.py"], "{newest:ckpt/*.pt}, for example"),
        (["submit", "loop.py", "restart_args=[--resume]"], "restart_args: is for scripts under `toolkit exec`"),
    ],
)
def test_words_for_a_restart_that_cannot_work_are_refused(words: list[str], says: str, command: Command) -> None:
    assert says in command.refuses(*words[:1], "--executor", "local", *words[1:])
    assert rundir.all_runs() == []


def test_why_does_not_say_that_a_script_with_checkpoints_of_its_own_has_none(
    command: Command,
) -> None:
    run = toolkit("submit", "plain.py", "--executor", "local")
    run.write_result(RunResult.from_json({"state": "failed", "why": "boom"}))
    page = " ".join(command("why", run.id).split())
    assert "last checkpoint:" not in page
    assert "starts the script again, which continues from its own checkpoints if it looks for them" in page


def test_a_command_is_shown_unsubmitted_and_a_submission_told_to_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--executor", "local", "cluster.time_min=1h", "--", "python", "plain.py"]
    assert cli.main(["exec", "--name", "x", "--dry-run", *given]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert "name: x\n" in shown
    assert "argv:\n- python\n- plain.py\n" in shown
    assert "time_min: 60" in shown
    assert cli.main(["exec", "--dry-run", "optim.lr=3", *given]) == EXIT_REQUEST
    assert rundir.all_runs() == []
    capsys.readouterr()
    for command in (["exec", "--json", *given], ["submit", "loop.py", "--json", "--executor", "local"]):
        run = toolkit(*command)
        told = {"run": run.id, "name": run.name, "job_id": None, "executor": "local", "path": str(run.path)}
        assert json.loads(capsys.readouterr().out) == told
