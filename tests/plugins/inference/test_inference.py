"""`toolkit evaluate` and `toolkit export` of runs with known weights, beside torch, PIL and numpy."""

import csv
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from jobs.models import lenet
from tests.command import Command
from tests.unit.checkpoint.ranks import blank
from tests.unit.owners import STRANGER, give
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEST, ConfigError, JobFailedError, RequestError
from toolkit.base.trust import TRUST_VARIABLE
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.checkpoint.writer import save
from toolkit.cli import main as cli
from toolkit.config import DataConfig, load_config
from toolkit.data.datasets import build_datasets
from toolkit.files import origin, rundir
from toolkit.files.rundir import RunDir
from toolkit.metrics.sinks import FanOut, JsonlSink, TensorBoardSink
from toolkit.plugins.inference import exported_program
from toolkit.plugins.inference import trained_model as inference
from toolkit.plugins.inference.evaluate_and_export import format_text
from toolkit.plugins.inference.trained_model import OneProcess
from toolkit.ranks.batch import Batch
from toolkit.ranks.state import Json, Replicated, Sharded
from toolkit.strategies.objective import Gathered, Loss, Measure
from toolkit.strategies.protocol import Strategy
from toolkit.train import initial as checkpoint_weights
from toolkit.train.evaluate import evaluate
from toolkit.train.job import Job, Training, evaluation

ROOT = Path(__file__).parents[3]
STEPS = (10, 20, 30)
ACCURACIES = {10: 0.5, 20: 0.9, 30: 0.7}


def weights(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return lenet(10, (1, 8, 8)).state_dict()


def entries(state: dict[str, Tensor]) -> dict[str, Replicated]:
    return {f"model/{name}": Replicated(value) for name, value in state.items()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run with three checkpoints. The one of step 30 also holds averages: the weights of step 31."""
    monkeypatch.chdir(ROOT)
    made = rundir.create("digits")
    settings = ["model.name=lenet", "checkpoint.keep_best=eval/accuracy"]
    made.config.write_text(configs.dump_config(configs.load_config(None, settings, site=False)))
    for step in STEPS:
        state = entries(weights(step))
        averages = {f"ema/{name}": Replicated(value) for name, value in weights(31).items()} if step == 30 else {}
        meta: dict[str, Json] = {"evaluated": step, "metrics": {"eval/accuracy": ACCURACIES[step], "train/loss": 1.0}}
        save(checkpoints(made), step, state | averages, meta, rank=0, world_size=1, kv=None)
    return made


def checkpoints(run: RunDir) -> CheckpointFolder:
    return CheckpointFolder(run.checkpoints, Keep(9))


def answer(command: Command, *argv: str) -> Any:
    return json.loads(command(*argv, "--json"))


def expected(state: dict[str, Tensor]) -> tuple[float, float]:
    """Return the loss and accuracy over the eval set, in one batch."""
    data = build_datasets(DataConfig()).eval
    inputs, targets = data.batch(np.arange(len(data)))  # type: ignore[union-attr]
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(state)
    logits = model(inputs)
    return functional.cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()


@pytest.mark.parametrize(
    ("argv", "step", "of"),
    [
        ([], 30, 31),
        (["--weights", "raw"], 30, 30),
        (["--checkpoint", "best"], 20, 20),
        (["--checkpoint", "10"], 10, 10),
    ],
    ids=["newest, averaged", "as trained", "best", "by its step"],
)
def test_the_figures_are_those_of_the_weights_that_were_asked_for(
    run: RunDir, command: Command, argv: list[str], step: int, of: int
) -> None:
    told = answer(command, "evaluate", run.id, *argv)
    loss, accuracy = expected(weights(of))
    assert (told["step"], told["weights"]) == (step, "average" if of == 31 else "raw")
    assert told["metrics"]["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert told["metrics"]["eval/accuracy"] == pytest.approx(accuracy)
    # the run judged the averages where it had some
    assert told["recorded"] == ({} if of == 30 else {"eval/accuracy": ACCURACIES[step]})


def test_a_damaged_checkpoint_gives_way_to_the_next_older_one(run: RunDir, command: Command) -> None:
    blank(run.checkpoints / "step-00000030/rank-00000.safetensors")
    assert answer(command, "evaluate", run.id)["step"] == 20
    command.ends(EXIT_FAILED, "evaluate", run.id, "--checkpoint", "30")


def test_weights_that_several_ranks_cut_up_are_whole_again(run: RunDir, command: Command) -> None:
    state: dict[str, Any] = {}
    for name, value in weights(7).items():
        state[f"model/{name}"] = Sharded(value, tuple(value.shape), (0,) * value.dim())
    save(checkpoints(run), 40, state, {}, rank=0, world_size=1, kv=None)
    told = answer(command, "evaluate", run.id)
    assert (told["step"], told["recorded"]) == (40, {})
    assert told["metrics"]["eval/loss"] == pytest.approx(expected(weights(7))[0], rel=1e-6)


def by_hand(path: Path, state: dict[str, Tensor]) -> tuple[str, float]:
    """Return the class and probability of an 8x8 grey image. PIL and numpy prepare it, without the toolkit."""
    pixels = np.asarray(Image.open(path).convert("L").resize((8, 8), Image.Resampling.BILINEAR), np.float32) / 255
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        found = model(torch.from_numpy((pixels - 0.3053) / 0.3760).view(1, 1, 8, 8)).softmax(1)[0]
    return str(int(found.argmax())), found.max().item()


def test_images_of_a_folder_are_classified_as_by_hand_and_a_torn_one_is_named(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scans"
    (folder / "more").mkdir(parents=True)
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(folder / "b.png")
    Image.fromarray(draw.integers(0, 256, (31, 20, 3), np.uint8)).save(folder / "more/a.PNG")
    (folder / ".hidden.png").write_text("")
    (folder / "notes.txt").write_text("")
    out = tmp_path / "found.csv"
    assert cli.main(["evaluate", run.id, "--images", str(folder), "--output", str(out)]) == EXIT_DONE
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["file"] for row in rows] == ["b.png", "more/a.PNG"]
    for row in rows:
        name, probability = by_hand(folder / row["file"], weights(31))  # the averages
        assert row["class"] == name
        assert float(row["probability"]) == pytest.approx(probability, rel=1e-4)
    (folder / "c.png").write_bytes(b"\x89PNG torn")
    capsys.readouterr()
    assert cli.main(["evaluate", run.id, "--images", str(folder), "--json"]) == EXIT_FAILED
    told = json.loads(capsys.readouterr().out)["predictions"]
    assert [(row["file"], row["error"] is None) for row in told] == [
        ("b.png", True),
        ("c.png", False),
        ("more/a.PNG", True),
    ]
    assert told[1]["class"] is None


def test_the_name_of_an_image_need_not_be_utf8(run: RunDir, tmp_path: Path, capfdbinary: Any) -> None:
    (folder := tmp_path / "scans").mkdir()
    Image.new("L", (8, 8)).save(folder / os.fsdecode(b"caf\xe9.png"))
    command = ["evaluate", run.id, "--images", str(folder)]
    assert cli.main([*command, "--output", str(tmp_path / "found.csv")]) == EXIT_DONE
    assert b"\ncaf\xe9.png," in (tmp_path / "found.csv").read_bytes()
    capfdbinary.readouterr()
    assert cli.main(command) == EXIT_DONE
    assert b"\ncaf\xe9.png," in capfdbinary.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evaluate", "digits", "--checkpoint", "7"], "no checkpoint of step 7; there are: 30, 20, 10"),
        (["evaluate", "digits", "--checkpoint", "20", "--weights", "average"], "there is no moving average"),
        (["evaluate", "digits", "--data", "nmae=digits"], "did you mean 'data.name'?"),
        (["evaluate", "digits", "--images", "nowhere"], "no such folder"),
        (["evaluate", "digits", "--images", "sbatch"], "holds no images"),
        (["evaluate", "digits", "--output", "x.csv"], "must end in .json"),
        (["export", "digits", "docs"], "already exists"),
    ],
)
def test_a_wrong_request_is_refused_with_what_to_do(run: RunDir, argv: list[str], words: str, command: Command) -> None:
    told = command.ends(EXIT_REQUEST, *argv)
    assert words in told.err
    assert not told.out


def test_a_job_whose_data_are_no_images_classifies_none(run: RunDir, tmp_path: Path) -> None:
    with inference.trained(run, checkpoints(run).list()) as trained:
        trained.job.pictures = None
        with pytest.raises(RequestError, match="does not say how image files become its inputs"):
            next(inference.predictions(trained, tmp_path, [tmp_path / "a.png"]))


def test_a_job_that_does_not_say_how_it_is_judged_is_told_what_to_add(run: RunDir, command: Command) -> None:
    (run.code / "mine").mkdir(parents=True)
    (run.code / "mine/__init__.py").write_text("")
    (run.code / "mine/train.py").write_text("def main(config):\n    pass\n")
    run.config.write_text(run.config.read_text().replace("job: jobs.classify", "job: mine.train"))
    assert "has no class derived from toolkit.Job" in command.refuses("evaluate", run.id)


def test_another_model_than_the_configs_is_refused_by_its_tensors(run: RunDir, command: Command) -> None:
    run.config.write_text(run.config.read_text().replace("name: lenet", "name: mlp"))
    err = command.ends(EXIT_FAILED, "evaluate", run.id).err
    assert "another model than the run's config makes; not in the file" in err


def test_an_exported_program_gives_the_models_outputs(run: RunDir, tmp_path: Path, command: Command) -> None:
    out, inputs = tmp_path / "out", torch.randn(5, 1, 8, 8)
    told = answer(command, "export", run.id, str(out))
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert torch.equal(torch.export.load(out / "model.pt2").module()(inputs), model(inputs))
    assert all(torch.equal(value, weights(31)[name]) for name, value in model.state_dict().items())
    assert json.loads((out / "model.json").read_text()) == told
    assert told["sha256"]["model.pt2"] == hashlib.sha256((out / "model.pt2").read_bytes()).hexdigest()
    assert (told["step"], told["weights"], told["classes"]) == (30, "average", [str(n) for n in range(10)])
    assert told["input"] == {"shape": ["batch", 1, 8, 8], "dtype": "float32"}
    assert told["output"]["shape"] == ["batch", 10]
    assert told["metrics"] == {"eval/accuracy": 0.7}
    assert told["program"]["batch_sizes"] == [8, 7, 1]


class Regularised(nn.Module):
    """A model with other outputs in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Asking(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class Random(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand_like(inputs)


class OfEight(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(8, -1)


def test_batch_statistics_and_dropout_are_those_of_the_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Regularised()
    model(torch.randn(20, 4))  # so that the running statistics are others than a batch's
    model.eval()
    trial = exported_program.write_program(model, torch.randn(8, 4), tmp_path / "model.pt2")
    assert (trial.batch_sizes, trial.largest_difference) == ((8, 7, 1), 0.0)
    assert (tmp_path / "model.pt2").stat().st_mode & 0o077 == 0
    inputs = torch.randn(33, 4)
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(inputs), model(inputs))


class Masked(nn.Module):
    """A model whose outputs are nested, of several types, and not all finite."""

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        known = inputs > 0
        return {"logits": (inputs.masked_fill(known, -torch.inf), inputs * 2), "known": known}


def test_outputs_may_be_nested_infinite_and_true_or_false(tmp_path: Path) -> None:
    trial = exported_program.write_program(Masked().eval(), torch.randn(8, 4), tmp_path / "model.pt2")
    assert (trial.largest_difference, 0 < trial.bound < 1e-3) == (0.0, True)


def test_a_nan_in_any_batch_makes_the_difference_nan() -> None:
    """`max()` of Python leaves out a NaN that is not the first."""
    trial = exported_program._tried(
        nn.Identity(), lambda x: x if len(x) == 8 else x * torch.nan, torch.ones(8, 4), 1e-5
    )
    assert not trial.largest_difference <= trial.bound


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Asking(), "torch.export cannot take this model"),
        (OfEight(), "torch.export cannot take this model"),
        (Random(), "the exported program is not the model: outputs differ by up to"),
    ],
    ids=["asks for a value", "fixes the batch", "draws numbers"],
)
def test_what_is_no_program_is_refused_and_leaves_no_file(model: nn.Module, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match=words):
        exported_program.write_program(model.eval(), torch.randn(8, 4), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_weights_are_written_all_the_same(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def refuse(*args: Any) -> None:
        raise JobFailedError("torch.export cannot take this model")

    monkeypatch.setattr(exported_program, "write_program", refuse)
    assert "has what was written before that" in command.ends(EXIT_FAILED, "export", run.id, str(tmp_path / "both")).err
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["model.json", "model.safetensors"]
    assert json.loads((tmp_path / "both/model.json").read_text())["program"] is None
    command.ends(EXIT_FAILED, "export", run.id, str(tmp_path / "alone"), "--format", "program")
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize("why", ["no eval set", "two arguments"])
def test_weights_need_no_example(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, why: str
) -> None:
    if why == "no eval set":
        monkeypatch.setattr("jobs.classify.Classify.eval_set", lambda job: None)
    else:
        monkeypatch.setattr(
            "jobs.classify.Classify.evaluate", lambda job, model, batch: model(batch.inputs, batch.targets)
        )
    about = answer(command, "export", run.id, str(tmp_path / "weights"), "--format", "safetensors")
    assert (about["input"], about["output"], [*about["sha256"]]) == (None, None, ["model.safetensors"])
    assert "has what was written before that" in command.ends(EXIT_FAILED, "export", run.id, str(tmp_path / "both")).err
    assert (tmp_path / "both/model.safetensors").exists()


def test_a_job_by_path_is_imported_with_its_neighbours_and_params_from_the_sources(run: RunDir) -> None:
    (run.code / "tasks").mkdir(parents=True)
    (run.code / "tasks/nets.py").write_text("WIDTH = 3\n")
    params = "from dataclasses import dataclass\nfrom nets import WIDTH\n@dataclass\nclass Params:\n  depth: int = 1\n"
    job = f"import toolkit\n{params}class Mine(toolkit.Job):\n  def model(self):\n    return WIDTH, self.params.depth\n"
    (run.code / "tasks/by_path.py").write_text(job)
    settings = ["job=tasks/by_path.py", "params.depth=5"]
    run.config.write_text(configs.dump_config(configs.load_config(None, settings, project=run.code)))
    config = configs.load_config(run.config, site=False)
    job_of_run: Any = inference._job_of(run, config, run.path, torch.device("cpu"))
    assert job_of_run.model() == (3, 5)


@pytest.fixture
def strange(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Yield a run of another user, whose job leaves a mark where it is imported."""
    run.code.mkdir(parents=True)
    mark = f"open({str(tmp_path / 'mark')!r}, 'w').close()"
    (run.code / "strange_job.py").write_text(
        f"{mark}\nimport toolkit\nclass Strange(toolkit.Job):\n    def setup(self): raise OSError\n"
    )
    run.config.write_text(configs.dump_config(configs.load_config(None, ["job=strange_job"], site=False)))
    give(STRANGER, [run.path, run.code, run.config], monkeypatch)
    monkeypatch.setenv(TRUST_VARIABLE, "")
    yield run
    sys.modules.pop("strange_job", None)


@pytest.mark.parametrize("command", ["evaluate", "export", "resume"])
def test_another_users_sources_run_only_where_that_is_asked_for(
    command: str, strange: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, str(strange.path), *([str(tmp_path / "out")] if command == "export" else [])]
    assert cli.main(argv) == EXIT_REQUEST
    words = capsys.readouterr().err
    assert f"{strange.path} belongs to {STRANGER}" in words
    assert "--trust" in words
    assert not (tmp_path / "mark").exists()
    if command != "resume":
        cli.main([*argv, "--trust"])
        assert (tmp_path / "mark").exists()


def test_another_users_config_that_names_a_file_runs_it_only_where_that_is_asked_for(
    strange: RunDir, tmp_path: Path
) -> None:
    elsewhere = strange.code.rename(tmp_path / "elsewhere")  # a run without a copy of its sources
    settings = [f"job={elsewhere / 'strange_job.py'}"]
    fsio.write_atomic(strange.config, configs.dump_config(configs.load_config(None, settings, site=False)))
    assert cli.main(["evaluate", str(strange.path)]) == EXIT_REQUEST
    assert not (tmp_path / "mark").exists()
    cli.main(["evaluate", str(strange.path), "--trust"])
    assert (tmp_path / "mark").exists()


def test_another_users_weights_are_read_without_running_their_sources(strange: RunDir, tmp_path: Path) -> None:
    argv = ["checkpoint", "export", str(strange.path), "--to", str(tmp_path / "x.safetensors")]
    assert cli.main(argv) == EXIT_DONE
    found = checkpoint_weights.read_weights(origin.find(str(strange.path))).tensors
    assert found.keys() == weights(30).keys()
    assert not (tmp_path / "mark").exists()


def test_the_figures_of_each_class_are_those_counted_by_hand(run: RunDir, command: Command) -> None:
    rows = answer(command, "evaluate", run.id, "--per-class", "--weights", "raw")["classes"]
    data = build_datasets(DataConfig()).eval
    inputs, targets = data.batch(np.arange(len(data)))  # type: ignore[union-attr]
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(weights(30))
    pairs = [*zip(targets.tolist(), model(inputs).argmax(1).tolist(), strict=True)]
    assert [row["class"] for row in rows] == [str(digit) for digit in range(10)]
    for digit, row in enumerate(rows):
        mine = [guess for truth, guess in pairs if truth == digit]
        claimed = [truth for truth, guess in pairs if guess == digit]
        right, wrong = mine.count(digit), [guess for guess in mine if guess != digit]
        recall = right / len(mine)
        precision = right / len(claimed) if claimed else None
        assert (row["samples"], row["recall"], row["precision"]) == (len(mine), recall, precision)
        harmonic = 2 * recall * precision / (recall + precision) if precision else 0.0
        assert row["f1"] == pytest.approx(harmonic)
        assert row["taken_for"] in ([None] if not wrong else [str(g) for g in wrong if wrong.count(g) == most(wrong)])


def test_a_model_with_more_outputs_than_classes_has_no_figures_by_class(run: RunDir) -> None:
    with inference.trained(run, checkpoints(run).list()) as trained:
        trained.job.classes = ("0", "1")
        with pytest.raises(RequestError, match="names 2, and the model has 10 outputs; name a class for each output"):
            inference.by_class(trained)


def most(values: list[int]) -> int:
    return max(values.count(value) for value in values)


def test_the_table_of_classes_fits_a_terminal_and_ends_with_the_means(run: RunDir, command: Command) -> None:
    lines = command("evaluate", run.id, "--per-class").splitlines()
    assert [line.split()[0] for line in lines[-12:]] == ["class", *map(str, range(10)), "mean"]
    assert lines[-1].split()[1] == "360"
    assert max(map(len, lines[-12:])) <= 80


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["evaluate", "RUN", "--per-class", "--images", "."], "--per-class: the classes of --images are not known"),
        (["export", "RUN", "OUT", "--aot", "--format", "safetensors"], "--aot: compiles the program"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    run: RunDir, argv: list[str], says: str, tmp_path: Path, command: Command
) -> None:
    words = [{"RUN": run.id, "OUT": str(tmp_path / "out")}.get(word, word) for word in argv]
    assert says in command.refuses(*words)


@pytest.mark.soak
def test_a_compiled_program_computes_what_the_model_does(run: RunDir, tmp_path: Path, command: Command) -> None:
    about = answer(command, "export", run.id, str(tmp_path / "out"), "--aot", "--weights", "raw")
    assert about["compiled"]["largest_difference"] <= about["compiled"]["bound"]
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(weights(30))
    compiled = torch._inductor.aoti_load_package(str(tmp_path / "out/compiled.pt2"))
    images = torch.randn(5, 1, 8, 8)
    assert torch.allclose(compiled(images), model(images), atol=1e-4)
    assert set(about["sha256"]) == {"compiled.pt2", "model.pt2", "model.safetensors"}


def test_a_compiler_that_fails_leaves_the_weights_and_the_program(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    says = command.ends(EXIT_FAILED, "export", run.id, str(tmp_path / "out"), "--aot").err
    assert "AOTInductor cannot compile this model (RuntimeError: no C++ compiler)" in says
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.json", "model.pt2", "model.safetensors"}


def test_a_compiled_program_that_computes_something_else_is_refused(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = nn.Linear(2, 2).eval(), tmp_path / "compiled.pt2"
    torch.export.save(torch.export.export(model, (torch.ones(2, 2),)), tmp_path / "model.pt2")
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", lambda *_, package_path: Path(package_path).touch())
    monkeypatch.setattr("torch._inductor.aoti_load_package", lambda path: lambda inputs: model(inputs) + 1)
    with pytest.raises(JobFailedError, match="the exported program is not the model: outputs differ by up to 1"):
        exported_program.compile_program(model, torch.ones(2, 2), tmp_path / "model.pt2", path)
    assert not path.exists()


VALUES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])


class Alone(OneProcess):
    def __init__(self) -> None:
        super().__init__(
            cast(Any, SimpleNamespace(model=None, device=torch.device("cpu"), config=load_config(None, site=False)))
        )


def batches() -> Iterator[Batch]:
    for start in (0, 3):
        yield Batch(VALUES[start : start + 3], torch.arange(start, min(start + 3, 5)), 5)


def figures_of(measure: Measure) -> dict[str, Any] | None:
    return evaluate(cast(Strategy, Alone()), batches(), len(VALUES), measure)


def test_a_figure_that_one_batch_lacks_is_refused_with_both_lists_of_names() -> None:
    def measure(model: Any, batch: Batch) -> dict[str, Tensor]:
        return {"loss": batch.data} | ({"recall": batch.data} if (batch.data > 0).all() else {})

    with pytest.raises(JobFailedError, match=r"returned loss, recall, for another loss; return each figure for every"):
        figures_of(measure)


class OneOfThree(Alone):
    """The last of three ranks, of which the first two have ``others``."""

    def __init__(self, others: dict[str, Tensor]) -> None:
        super().__init__()
        self.others, self.digests = others, dict[str, Tensor]()

    def by_rank(self, values: Any) -> dict[str, Tensor]:
        own = super().by_rank(values)
        self.digests = {name: torch.cat([self.others.get(name, value)] * 2 + [value]) for name, value in own.items()}
        return self.digests


@pytest.mark.parametrize("names", [("scores", "labels"), ()], ids=["another name", "no rows"])
def test_rows_that_not_every_rank_has_are_refused_with_the_rank_and_its_names(names: tuple[str, ...]) -> None:
    """Before, another name was a KeyError, and the rows of a rank without any were left out."""

    def measure(model: Any, batch: Batch) -> dict[str, Any]:
        return {"loss": batch.data} | {name: Gathered(batch.data) for name in here}

    here: tuple[str, ...] = ("scores", "classes")
    others = OneOfThree({})
    assert evaluate(cast(Strategy, others), batches(), len(VALUES), measure)
    here = names
    odd = OneOfThree({name: digest[:1] for name, digest in others.digests.items()})
    words = ", ".join(["loss", *sorted(here)])
    with pytest.raises(JobFailedError, match=f"figures of rank 2 differ .* of this rank are {words}; return each"):
        evaluate(cast(Strategy, odd), batches(), len(VALUES), measure)


def test_a_mean_over_some_samples_is_nan_where_there_are_none_at_all() -> None:
    def measure(model: Any, batch: Batch) -> dict[str, Loss]:
        above = batch.data > 0
        some, none = Loss.sum(batch.data[above].sum(), above.sum()), Loss.sum(batch.data[:0].sum(), 0)
        # Another order for the second batch: a figure is found by its name.
        return {"some": some, "none": none} if above.all() else {"none": none, "some": some}

    figures = figures_of(measure)
    assert figures["some"] == 1.0
    assert math.isnan(figures["none"])


def test_an_eval_set_with_fewer_samples_than_ranks_is_refused_before_the_training() -> None:
    with pytest.raises(ConfigError, match="eval_set\\(\\) has 1 samples, fewer than the 2 ranks; use"):
        evaluation(cast(Any, None), VALUES[:1], ranks=2)


def test_an_evaluation_whose_summary_has_no_figures_is_printed() -> None:
    found = {"step": 7, "name": "digits", "run": "20260101", "weights": "raw", "device": "cpu"}
    assert format_text({**found, "metrics": {}, "recorded": {}}) == "step 7 of digits/20260101, weights: raw, on cpu"


class Showing(Job):
    asked = 0

    def eval_set(self) -> Any:
        self.asked += 1
        return VALUES

    def show(self, model: Any, batch: Batch) -> dict[str, Tensor | str]:
        return {"rgba": torch.zeros(2, 4, 8, 8), "scores": batch.data}


def shown(folder: Path) -> tuple[Showing, list[dict[str, Any]]]:
    """Return the job after a training that only shows something, and what was logged."""
    job = Showing(load_config(None, site=False), None, folder, torch.device("cpu"))
    sink = FanOut([TensorBoardSink(folder), JsonlSink(folder / "metrics.jsonl", None)])
    trainer = SimpleNamespace(fit=lambda evaluate, describe, show, hooks: show(sink, 7))
    Training(job, cast(Strategy, Alone()), cast(Any, trainer), lambda sink: None, sink.close).fit()
    sink.close()
    return job, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_be_shown_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, (line,) = shown(tmp_path)
    assert sum(line["scores"].values()) == len(VALUES)
    assert "'rgba' is not logged: AssertionError" in caplog.text


def test_a_job_with_a_show_is_asked_for_its_eval_set_once(tmp_path: Path) -> None:
    job, _ = shown(tmp_path)
    assert job.asked == 1
