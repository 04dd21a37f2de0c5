"""Which keys act on a script: those that it reads, by its syntax tree, and those that the toolkit reads for it."""

import textwrap
from pathlib import Path

import pytest

from tests.command import Command
from toolkit.base.errors import ConfigError
from toolkit.cli.commands.completion import complete
from toolkit.cli.run_rows import read_config
from toolkit.config import SCRIPT_JOB, load_config
from toolkit.config.script_keys import acting_keys
from toolkit.config.source import PythonSource, project_files
from toolkit.files.run_files import RunResult
from toolkit.run.prepare.new_run import load, new_run
from toolkit.run.prepare.snapshot import shown_values
from toolkit.run.submission.resume_run import resume

START = "import toolkit\nrun = toolkit.start()\n"
ARGUMENTS = """
import argparse, toolkit
parser = argparse.ArgumentParser()
parser.add_argument("-l", "--lr", type=float, default=0.1, help="the rate,\\n  at first")
parser.add_argument("--amp", action="store_true")
with toolkit.start() as run: ...
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("data: {workers: 3}\n")
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


#: What a script reads, as one of its lines or more; all else of the last column it does not.
READS = [
    ("", "", "optim.lr data.workers model.name train.epochs params data.root checkpoint.keep_best args"),
    ("run.config.optim.lr", "optim.lr", "optim.momentum train.epochs"),
    ("print(run.config.optim)", "optim.lr optim.momentum", "train.epochs"),
    ("cfg = run.config\nprint(cfg.optim.lr)", "optim.lr", "optim.momentum train.epochs"),
    ("o = run.config.optim\nprint(o.lr)", "optim.lr", "optim.momentum train.epochs"),
    (
        "class T:\n  def f(self): self.cfg = run.config\n  def g(self): return self.cfg.optim.lr",
        "optim.lr",
        "train.epochs",
    ),
    ("with toolkit.current() as r: print(r.config.optim.lr)", "optim.lr", "train.epochs"),
    ("print((c := run.config).optim.lr, c.train.epochs)", "optim.lr train.epochs", "model.name"),
    ("getattr(run.config.optim, 'lr')", "optim.lr", "optim.momentum"),
    ("getattr(run.config, 'optim').lr", "optim.lr", "train.epochs"),
    ("getattr(run, 'config').optim.lr", "optim.lr", "train.epochs"),
    ("getattr(run.config.optim, name)", "optim.lr optim.momentum", "train.epochs"),
    ("build(run.config)", "optim.lr train.epochs model.name params", ""),
    ("print(vars(run.config))", "optim.lr train.epochs", ""),
    ("run.loader(data)", "data.global_batch_size data.workers", "data.name"),
    ("run.loader(data, global_batch_size=8)", "data.workers", "data.global_batch_size"),
    ("run.loader(data, global_batch_size=8, workers=None)", "data.workers", "data.global_batch_size"),
    ("run.loader(data, **more)", "data.global_batch_size data.workers", "data.name"),
    ("class A:\n  def f(self): return list(self.loader(1))", "", "data.global_batch_size"),
    ("run.params(Params)", "params", "optim.lr"),
    ("import helper\nhelper.rate(run)", "optim.lr", "train.epochs"),
    ("from pack.deep import rate", "optim.lr", "train.epochs"),
    ("import of_nobody\nof_nobody.train(run)", "optim.lr train.epochs args", ""),
    ("import of_nobody\nof_nobody.train(3)", "args", "optim.lr"),
    ("import importlib\nimportlib.import_module(name)", "optim.lr args", ""),
    ("config = toolkit.load_config('c.yaml')", "optim.lr", ""),
    ("from transformers import AutoModel as M\nmodel = M.of('x')\nprint(model.config, M.config)", "", "optim.lr"),
    ("model.config.hidden_size", "", "optim.lr"),
    ("torch.optim.SGD(params, lr=0.1)", "", "optim.lr params"),
    ("class GPT:\n  def __init__(self, config): self.config = config; print(self.config)", "", "optim.lr"),
    ("import sys\nprint(sys.argv)", "args argv", "optim.lr"),
]


@pytest.mark.parametrize(("line", "reads", "not_read"), READS)
@pytest.mark.parametrize("job", ["train.py", SCRIPT_JOB])
def test_a_loop_reads_what_its_files_name(line: str, reads: str, not_read: str, job: str) -> None:
    helper = "def rate(r):\n    return r.config.optim.lr\n"
    write(train=START + line, helper=helper, pack__deep="from . import other\n", pack__other=helper)
    acting = acting_keys(job, ["python", "-u", "train.py"])
    assert all(map(acting.has_effect, ["train.max_steps", "cluster.nodes", "checkpoint.keep", *reads.split()]))
    assert [key for key in not_read.split() if acting.has_effect(key)] == []


def test_modules_are_read_only_where_the_script_leaves_a_key_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def files(script: PythonSource, project: Path) -> tuple[PythonSource, ...]:
        read.append(script.path.name)
        return project_files(script, project)

    monkeypatch.setattr("toolkit.config.script_keys.project_files", files)
    write(train=ARGUMENTS + "import helper\nrun.config.optim.lr", helper="def of(run): return run.config.model.name")
    load("train.py", ["cluster.nodes=2", "args.lr=1", "optim.lr=2", "train.max_steps=3"], Path.cwd())
    assert read == []
    load("train.py", ["model.name=cnn"], Path.cwd())
    assert read == ["train.py"]
    with pytest.raises(ConfigError, match=r"train.py does not read it"):
        load("train.py", ["optim.momentum=0.5"], Path.cwd())


@pytest.mark.parametrize(
    ("command", "is_known"),
    [
        ("python train.py", True),
        ("torchrun --nproc-per-node 2 train.py --x", True),
        ("python -m pack.train", True),
        ("bash -c 'cd .; exec python train.py'", True),
        ("bash go.sh", True),
        ("./a.out", False),
    ],
)
def test_a_command_is_known_by_the_scripts_that_it_names(command: str, is_known: bool) -> None:
    write(train="print(1)", pack__train="print(1)")
    Path("go.sh").write_text('module load cuda\nsrun python -u train.py "$@"\n')
    acting = acting_keys(SCRIPT_JOB, [command.split()[0], command.partition(" ")[2]])
    assert acting.has_effect("optim.lr") is not is_known
    assert acting.has_effect("checkpoint.keep") is not is_known
    assert acting.has_effect("cluster.nodes")


def test_all_keys_act_on_a_class_and_on_a_main_that_hands_its_config_on() -> None:
    write(
        job="import toolkit\nclass A(toolkit.Job): ...",
        main="def main(c): train(c)",
        lr="def main(c): print(c.optim.lr)",
    )
    assert acting_keys("job.py", ()).has_effect("optim.lr")
    assert acting_keys("main.py", ()).has_effect("model.name")
    acting = acting_keys("lr.py", ())
    assert [acting.has_effect(key) for key in ("optim.lr", "optim.momentum", "checkpoint.keep")] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        (ARGUMENTS, "optim.lr=5", r"optim.lr: train.py does not read it.* write args.lr=5$"),
        (ARGUMENTS, "model.name=x", r"its own options are args.lr, args.amp$"),
        (ARGUMENTS, "optim={lr: 5}", r"write args.lr=5$"),
        (START, "train.epochs=3", r"read run.config.train.epochs there, or leave it out"),
        (START + "import hydra", "optim.lr=3", r"its own arguments come after `--`"),
        ("def main(config): ...", "optim.lr=3", r"read it from the config in its main, or leave it out"),
        (START, "args.lr=3", r"args: train.py reads no command line"),
        ("print(1)", "checkpoint.keep=3", r"checkpoint.keep: train.py does not read it"),
        (
            "import click\n@click.option('--learning-rate', '-r')\ndef f(): ...\nf()",
            "optim.lr=1",
            "args.learning-rate=1$",
        ),
        ("import fire\ndef f(lr=1): ...\nfire.Fire(f)", "optim.lr=1", "args.lr=1$"),
        ("from absl import flags\nflags.DEFINE_float('lr', 1, 'x')", "optim.lr=1", "args.lr=1$"),
    ],
)
def test_a_key_that_changes_nothing_is_refused_with_what_to_write(text: str, given: str, says: str) -> None:
    write(train=text)
    with pytest.raises(ConfigError, match=says):
        load("train.py", [given], Path.cwd())
    Path("c.yaml").write_text("job: train.py\n" + "optim:\n  momentum: 0.1\n")
    with pytest.raises(ConfigError, match=r"c.yaml, line 3: optim.momentum: train.py does not read it"):
        load("c.yaml", [], Path.cwd())


PARSED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int)
parser.add_argument("--amp", action=argparse.BooleanOptionalAction)
parser.add_argument("data")
"""
PARSES = PARSED + "args = parser.parse_args()\n"


@pytest.mark.parametrize(
    ("text", "knows_all"),
    [
        (PARSES, True),
        (PARSED + "group = parser.add_argument_group('x')\ngroup.add_argument('--more')\nparser.parse_args()", True),
        ("import options\nargs = options.parser_of().parse_args()", True),
        ("from options import parser_of\nparser = parser_of()\nargs = parser.parse_args()", True),
        (PARSED + "args, rest = parser.parse_known_args()", False),
        (PARSED + "args = parser.parse_args(words)", False),
        (PARSES + "for name in names: parser.add_argument('--' + name)", False),
        (PARSES + "parser.add_argument('rest', nargs=argparse.REMAINDER)", False),
        (PARSES + "deepspeed.add_config_arguments(parser)", False),
        (PARSES + "getattr(library, 'extend')(parser=parser)", False),
        (PARSES + "import sys\nsys.argv.remove('--x')", False),
        (PARSED + "class Mine(argparse.ArgumentParser): ...\nMine().parse_args()", False),
        ("import tap\nparser = tap.Tap()\nargs = parser.parse_args()", False),
        ("from jsonargparse import ArgumentParser\nparser = ArgumentParser()\nargs = parser.parse_args()", False),
        ("import options\n", False),
        ("import click\n@click.option('--lr')\ndef f(): ...\nf()", False),
    ],
)
def test_an_option_that_no_parser_of_the_script_has_is_refused(text: str, knows_all: bool) -> None:
    parser_of = textwrap.indent(PARSED, "    ") + "    return parser\n"
    write(train=START + text, plain=text, options="def parser_of():" + parser_of + "if __name__ == '__main__': main()")
    for script in ("train.py", "plain.py"):
        for name in ("b", "batch-size", "batch", "amp", "no-amp", "help"):
            assert load(script, [f"args.{name}=1"], Path.cwd()).args == {name: 1}
        load(script, ["args.batch_size=1", 'argv=["--batch_size", "3"]'], Path.cwd())
        if knows_all:
            why = rf"args.batch_size: {script} has no option --batch_size; did you mean 'batch-size'\? it takes amp, "
            with pytest.raises(ConfigError, match=why):
                load(script, ["args.batch_size=1"], Path.cwd())
        else:
            load(script, ["args.batch_size=1"], Path.cwd())


@pytest.mark.parametrize(
    ("command", "is_checked"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py", "x"], True),
        (["bash", "-c", "python train.py"], False),
        (["bash", "go.sh"], False),
        (["python", "launch.py", "train.py"], False),
    ],
)
def test_options_of_a_command_are_checked_where_they_are_its_scripts(command: list[str], is_checked: bool) -> None:
    write(train=PARSES, launch="import subprocess, sys\nsubprocess.run(sys.argv[1:])")
    Path("go.sh").write_text("python train.py $1\n")
    refusal = acting_keys(SCRIPT_JOB, command).refusal_of_option("lr")
    assert (refusal is not None) == is_checked


def test_keys_of_a_program_that_cannot_be_read_are_said_to_be_unchecked(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    Path("a.out").write_bytes(b"\x7fELF\xd0\xcb")
    Path("go.sh").write_text("#!/bin/sh\nexec ./a.out\n")
    for _ in range(2):
        load(None, ["optim.lr=1", "cluster.nodes=1", f"job={SCRIPT_JOB}", 'argv=["./a.out"]', "args.x=1"], Path.cwd())
    assert caplog.messages == ["./a.out cannot be read as Python, so whether it reads optim.lr is not known"]
    for file in ("a.out", "go.sh"):
        assert f"; a program is run by `toolkit exec -- {Path.cwd() / file}`" in command.refuses("submit", file)


def test_a_key_that_another_one_refers_to_acts() -> None:
    write(train=ARGUMENTS)
    Path("c.yaml").write_text("job: train.py\noptim: {lr: 5}\nargs: {lr: '${optim.lr}'}\n")
    assert load_config("c.yaml").args == {"lr": 5}


def test_the_help_and_the_shell_offer_what_acts(command: Command) -> None:
    write(train=ARGUMENTS)
    page = command("submit", "train.py", "--help-all")
    assert "options of train.py, behind `--` or as args.NAME=VALUE:\n  --lr " in page
    assert "default 0.1; the rate, at first\n" in page
    assert "  train.max_steps: " in page
    assert "optim" not in page
    assert "train.epochs" not in page
    assert complete("toolkit submit train.py args.") == ["args.amp=", "args.lr="]
    assert complete("toolkit submit train.py -- --") == ["--amp", "--lr"]
    assert complete("toolkit exec -- python train.py --l") == ["--lr"]
    assert complete("toolkit submit train.py optim") == []
    assert "optim.lr=" in complete("toolkit submit c.yaml optim")


def test_a_run_shows_and_changes_only_what_acts_on_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(project / "runs"))
    write(train=START + "print(run.config.optim.lr)", job="import toolkit\nclass A(toolkit.Job): ...")
    run = new_run(load("train.py", ["optim.lr=0.5"], project), project)
    write(train="changed = True")
    for values in (read_config(run), shown_values(run)[0]):
        assert {"optim.lr", "train.seed", "cluster.nodes"} <= values.keys()
        assert values.keys().isdisjoint({"optim.momentum", "data.workers", "train.epochs"})
    assert "train.epochs" in read_config(new_run(load("job.py", [], project), project))
    run.write_result(RunResult.from_json({"state": "completed", "why": ""}))
    with pytest.raises(ConfigError, match=r"train.epochs: train.py does not read it"):
        resume(run, ["train.epochs=20"])
