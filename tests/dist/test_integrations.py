"""Scripts of Lightning, transformers and accelerate stop together, and come back.

They end as undisturbed ones.
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.script_ranks import PRELOAD, ROOT, ScriptServer
from tests.dist.test_own_scripts import LOOPS
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.train.feed import IterableFeed, seeder

SCRIPTS = Path(__file__).parent / "library_scripts"
EVERY = ["checkpoint.every_steps=20", "train.log_every=10"]
RANKS = 3  #: a sum of two has the same bits in any order, and would show no difference
ENDED, STOPPED = [0] * RANKS, [75] * RANKS
STEPS = {"accelerate": 96, "lightning": 96, "transformers": 128}
NOISY = """
class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), target
"""
MASKED = """
def masked(samples):
    batch = default_data_collator(samples)
    batch["input_ids"] *= torch.rand(batch["input_ids"].shape) > 0.2
    return batch
"""
GENERATING = """
class Generating(Trainer):
    made = 0

    def training_step(self, model, inputs, *more):
        if self.made % 2 == 0:
            self.kept = inputs
        self.made += 1
        return super().training_step(model, dict(self.kept), *more)
"""
SHUFFLED = """
class Shuffled(torch.utils.data.BatchSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.epoch))
        yield from order.view(-1, self.batch_size).tolist()


class Shuffling(Trainer):
    def get_train_dataloader(self):
        batches = Shuffled(range(len(dataset)), 4, drop_last=True)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)
"""
END = {"accelerate": "end/model.safetensors", "lightning": "end.ckpt", "transformers": "end/model.safetensors"}

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ScriptServer]]:
    started: dict[str, ScriptServer] = {}
    yield started
    for server in started.values():
        server.close()


class Script:
    """One library's script in one test."""

    def __init__(self, servers: dict[str, ScriptServer], library: str, folder: Path) -> None:
        self.library, self._folder = library, folder
        self._server = servers.get(library) or servers.setdefault(library, ScriptServer(PRELOAD[library]))

    def change(self, *replaced: tuple[str, str]) -> None:
        """Run a script in which these words stand for others."""
        text = (SCRIPTS / f"{self.library}_after.py").read_text()
        for old, new in replaced:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (self._folder / f"{self.library}_changed.py").write_text(text)

    def attempt(self, run: str, *strikes: tuple[int, int, str, str], kind: str = "after", more: str = "") -> list[int]:
        told = [{"rank": rank, "step": step, "signal": signal, "at": at} for rank, step, signal, at in strikes]
        overrides = [*EVERY, *more.split()]
        folder = self._folder if kind == "changed" else SCRIPTS
        return self._server.attempt(folder / f"{self.library}_{kind}.py", self._folder / run, overrides, told, RANKS)

    def log(self, run: str, attempt: int, rank: int) -> str:
        return (self._folder / f"{run}.{attempt}.{rank}.log").read_text()

    def end(self, run: str) -> dict[str, torch.Tensor]:
        """The weights that the script has saved at its end."""
        return weights(self._folder / run / "cwd" / END[self.library])

    def saved(self, run: str) -> list[int]:
        """The steps of the run's checkpoints, each verified byte by byte."""
        checkpoints = CheckpointFolder(self._folder / run / "checkpoints")
        return [checkpoints.verify(path).step for path in reversed(checkpoints.list())]

    def must_end_alike(self, one: str, other: str) -> None:
        mine, others = self.end(one), self.end(other)
        assert mine.keys() == others.keys()
        assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


def weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=path.suffix == ".pt")
    return found if path.suffix == ".pt" else found["state_dict"]  # type: ignore[return-value]


@pytest.fixture
def script(servers: dict[str, ScriptServer], library: str, tmp_path: Path) -> Script:
    return Script(servers, library, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("library", PRELOAD)
def test_a_stopped_and_killed_script_ends_bit_for_bit_as_an_undisturbed_one(script: Script) -> None:
    assert script.attempt("whole") == ENDED
    assert script.attempt("again", (1, 7, "SIGTERM", "step")) == STOPPED
    stops = [re.findall(r"stopped at step (\d+) of", script.log("again", 1, rank)) for rank in range(RANKS)]
    assert stops[0] == stops[1] == stops[2] == [str(script.saved("again")[-1])]
    # Killed when it has written its part of step 40: what rank 0 has written by then is no checkpoint.
    assert -9 in script.attempt("again", (1, 40, "SIGKILL", "saved"))
    assert script.saved("again")[-1] < 40
    assert script.attempt("again") == ENDED
    script.must_end_alike("whole", "again")
    result = json.loads((script._folder / "again/result.json").read_text())
    assert (result["state"], result["step"]) == ("completed", STEPS[script.library])
    assert result["metrics"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("library", "replaced"),
    [
        # Its own checkpoints have names by number, in a folder of its own.
        (
            "accelerate",
            [
                ("import set_seed", "import ProjectConfiguration, set_seed"),
                ("cpu=True", "cpu=True, project_config=ProjectConfiguration('out', automatic_checkpoint_naming=True)"),
            ],
        ),
        # Gradients of several batches, without accelerator.accumulate.
        (
            "accelerate",
            [
                ("        optimizer.zero_grad()\n", ""),
                (
                    "        optimizer.step()\n",
                    "        if run.step % 3 == 2:\n            optimizer.step()\n            optimizer.zero_grad()\n",
                ),
            ],
        ),
        # A validation after the steps that are saved, counted in the weights.
        (
            "lightning",
            [
                (
                    "        self.net =",
                    "        self.register_buffer('validations', torch.zeros(()))\n        self.net =",
                ),
                (
                    "    def configure",
                    "    def on_validation_end(self):\n        self.validations += 1\n\n    def configure",
                ),
                ("max_epochs=6", "max_epochs=6, val_check_interval=4, num_sanity_val_steps=0"),
            ],
        ),
        # Workers that persist, and draw random numbers for their samples.
        (
            "lightning",
            [
                ("dataset = TensorDataset(", NOISY + "\n\ndataset = Noisy("),
                ("batch_size=8, shuffle=True", "batch_size=8, shuffle=True, num_workers=1, persistent_workers=True"),
            ],
        ),
        # Its own checkpoints hold the weights alone, and it ends early: the loss is to rise for three evaluations.
        (
            "transformers",
            [
                ("import BertConfig", "import EarlyStoppingCallback, BertConfig"),
                ('save_strategy="no"', 'save_strategy="no", save_only_model=True, metric_for_best_model="eval_loss"'),
                ("use_cpu=True", "use_cpu=True, greater_is_better=True"),
                ("resume = Tr", "trainer.add_callback(EarlyStoppingCallback(2))\nresume = Tr"),
            ],
        ),
        # A collator that draws random numbers, as that of masked language models does.
        (
            "transformers",
            [
                ("import BertConfig", "import default_data_collator, BertConfig"),
                ("set_seed(7)", MASKED + "\n\nset_seed(7)"),
                ("trainer = Trainer(", "trainer = Trainer(data_collator=masked, "),
                ("num_train_epochs=4", "num_train_epochs=3"),
            ],
        ),
        # Batches that are used twice, as trl's trainers use what they have generated.
        (
            "transformers",
            [
                ("set_seed(7)", GENERATING + "\n\nset_seed(7)"),
                ("trainer = Trainer(", "args.steps_per_generation = 2\ntrainer = Generating("),
                ("num_train_epochs=4", "num_train_epochs=3"),
            ],
        ),
        # A batch sampler with an epoch of its own, as sentence-transformers has.
        (
            "transformers",
            [
                ("set_seed(7)", SHUFFLED + "\n\nset_seed(7)"),
                ("trainer = Trainer(", "trainer = Shuffling("),
                ("num_train_epochs=4", "num_train_epochs=3"),
            ],
        ),
    ],
)
def test_what_else_a_script_asks_of_its_library_changes_no_resume(
    script: Script, replaced: list[tuple[str, str]]
) -> None:
    script.change(*replaced)
    assert script.attempt("whole", kind="changed") == ENDED
    assert -9 in script.attempt("again", (1, 23, "SIGKILL", "step"), kind="changed")
    assert script.attempt("again", (0, 70, "SIGTERM", "step"), kind="changed") == STOPPED
    assert script.attempt("again", kind="changed") == ENDED
    script.must_end_alike("whole", "again")
    ends = [json.loads((script._folder / run / "result.json").read_text())["step"] for run in ("whole", "again")]
    assert ends == [96, 96]


@pytest.mark.soak
@pytest.mark.parametrize("library", ["lightning"])
def test_a_script_stops_also_where_each_of_two_steps_is_followed_by_a_validation(script: Script) -> None:
    script.change(("max_epochs=6", "max_epochs=40, limit_train_batches=2, val_check_interval=1"))
    assert script.attempt("whole", kind="changed") == ENDED
    assert script.attempt("again", (1, 3, "SIGTERM", "step"), kind="changed") == STOPPED
    assert script.attempt("again", kind="changed") == ENDED
    script.must_end_alike("whole", "again")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")
@pytest.mark.parametrize("is_stateful", [False, True])
def test_workers_of_accelerates_loaders_may_persist_over_epochs(is_stateful: bool) -> None:
    from accelerate.data_loader import DataLoaderShard

    data = torch.arange(8)
    loader = DataLoaderShard(
        data, batch_size=2, num_workers=1, persistent_workers=True, use_stateful_dataloader=is_stateful
    )
    feed = IterableFeed(loader, seeder(3, 0), 1, is_there=False)
    for number in range(3):
        assert torch.equal(torch.cat([*feed.epoch(number, 0, 4 * number)]), data)


@pytest.mark.parametrize("library", ["accelerate"])
def test_copies_in_memory_are_refused_since_they_lack_the_librarys_state(script: Script) -> None:
    assert 0 not in script.attempt("copied", more="checkpoint.memory_every_steps=1")
    assert "checkpoint.memory_every_steps: the state is in accelerate's own files" in script.log("copied", 1, 0)


@pytest.mark.soak
@pytest.mark.parametrize("library", PRELOAD)
def test_wherever_a_script_is_hit_it_ends_bit_for_bit_as_an_undisturbed_one(script: Script) -> None:
    """A run stops after the step of a hit or the next one. Some hits are at an epoch's last or first step."""
    assert script.attempt("whole") == ENDED
    hits = [
        (0, 1, "SIGUSR1", "step"),
        (1, 15, "SIGUSR2", "step"),
        (0, 18, "SIGTERM", "step"),
        (0, 20, "SIGKILL", "save"),
        (1, 31, "SIGTERM", "step"),
        (0, 34, "SIGTERM", "step"),
        (0, 40, "SIGKILL", "saved"),
        (1, 63, "SIGTERM", "step"),
        (1, 79, "SIGKILL", "step"),
        (0, 90, "SIGTERM", "step"),
    ]
    for rank, step, signal, at in hits:
        done = max(script.saved("again"), default=0)  # the ranks agree on a stop while they make steps
        step = next(s for s in range(step, 200, 1 if at == "step" else 20) if s > done)
        codes = script.attempt("again", (rank, step, signal, at))
        assert codes == STOPPED if signal != "SIGKILL" else -9 in codes, (rank, step, signal, at)
    assert script.attempt("again") == ENDED
    script.must_end_alike("whole", "again")
    # Killed after its end, it comes back to the same end.
    assert script.attempt("again") == ENDED
    script.must_end_alike("whole", "again")
    assert script.attempt("plain", kind="before") == ENDED
    if script.library == "transformers":  # of which the toolkit changes no random number
        script.must_end_alike("whole", "plain")


@pytest.mark.parametrize(
    ("name", "page"), [(name, "docs/integrations.md") for name in PRELOAD] + [(name, "docs/loop.md") for name in LOOPS]
)
def test_the_docs_show_what_changes_in_a_script_and_it_is_at_most_ten_lines(name: str, page: str) -> None:
    before, after = ((SCRIPTS / f"{name}_{kind}.py").read_text().splitlines() for kind in ("before", "after"))
    lines = [
        line for line in difflib.unified_diff(before, after, n=0, lineterm="") if not re.match(r"---|\+\+\+", line)
    ]
    changed = [line for line in lines if not line.startswith("@@")]
    assert sum(line.startswith("+") for line in changed) <= 10
    shown = [line.rstrip() for line in changed if line.strip("+- ")]
    blocks: list[Any] = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert shown in [[line for line in block.splitlines() if line[:1] in "+-"] for block in blocks]
