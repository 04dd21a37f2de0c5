"""A loop that forgets one thing each: `toolkit resume-check` finds it, the toolkit holds it, or a page names it."""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dist.test_resume_check import command
from toolkit.files.rundir import RunDir
from toolkit.plugins.site.resume_compare import DIFFERENT, IDENTICAL, PROVES_NOTHING

pytestmark = pytest.mark.dist

LOOP = """
import itertools
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
import toolkit

{before}

with toolkit.start() as run:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=draw), torch.randn(64, 1, generator=draw))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
{setup}
    run.resumable({handed})
    for epoch in run.epochs(3):
{prologue}
        for batch in {steps}:
            x, y = batch
{first}
            loss = (model(x) - y).square().mean()
{weigh}
            optimizer.zero_grad()
            loss.backward()
            {step}
{last}
            run.log(loss=loss)
"""

DATA_SET = """
class Items(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.inputs[index] * self.noise(), self.inputs[index, :1]
"""
#: The data set above, with another way to make its noise.
LOADER_OF = "loader = torch.utils.data.DataLoader({}(), batch_size=4, shuffle=True{})"


@dataclass(frozen=True)
class Script:
    """The loop with some pieces of its own, and what a check of it says."""

    verdict: str = DIFFERENT
    before: str = ""
    setup: str = ""
    handed: str = "model=model, optimizer=optimizer"
    prologue: str = ""
    steps: str = "run.steps(loader)"
    first: str = ""
    weigh: str = ""
    step: str = "optimizer.step()"
    last: str = ""

    def text(self) -> str:
        pieces = {"setup": 4, "prologue": 8, "first": 12, "weigh": 12, "last": 12}
        cut = {name: textwrap.indent(textwrap.dedent(getattr(self, name)), " " * by) for name, by in pieces.items()}
        whole = {name: getattr(self, name) for name in ("before", "handed", "steps", "step")}
        return LOOP.format(**whole, **cut)


def of_data(code: str, name: str = "Items", workers: str = "") -> Script:
    """Return the loop over a data set whose noise is ``code``'s. The toolkit brings its generators to their place."""
    return Script(IDENTICAL, before=DATA_SET + code, setup=LOADER_OF.format(name, workers))


SCRIPTS = {
    "nothing": Script(IDENTICAL),
    # ------------------------------------------------------------------------------------ objects that have a state
    "the optimizer": Script(handed="model=model"),
    "a scheduler": Script(
        setup="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)", last="scheduler.step()"
    ),
    "a scaler whose scale is logged": Script(
        setup="scaler = torch.amp.GradScaler('cpu', init_scale=16.0, growth_interval=5)",
        weigh="loss = scaler.scale(loss)",
        step="scaler.step(optimizer)",
        last="scaler.update()\nrun.log(scale=scaler.get_scale())",
    ),
    "an average whose loss is logged": Script(
        setup="average = torch.optim.swa_utils.AveragedModel(model)",
        last="average.update_parameters(model)\nrun.log(average=(average(x) - y).square().mean())",
    ),
    "a target network": Script(
        setup="import copy\ntarget = copy.deepcopy(model)",
        weigh="loss = loss + (model(x) - target(x).detach()).square().mean()",
        last="if run.every(5):\n    target.load_state_dict(model.state_dict())",
    ),
    "an optimizer that is replaced": Script(
        prologue="if epoch == 1:\n    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)"
    ),
    # --------------------------------------------------------------------------------------------- plain variables
    "a counter": Script(setup="count = 0", weigh="loss = loss * (1 + count % 7 / 9)", last="count += 1"),
    "the best loss": Script(
        setup="best = 1e9", weigh="loss = loss * (0.5 if loss < best else 1.0)", last="best = min(best, float(loss))"
    ),
    "a replay buffer": Script(setup="replay = []", first="replay.append((x, y))\nx, y = random.choice(replay)"),
    "a layer's attribute": Script(last="model[2].p *= 0.97"),
    "a data set's attribute": Script(
        before=DATA_SET + "    scale = 1.0\n    def noise(self):\n        return self.scale",
        setup="data = Items()\nloader = torch.utils.data.DataLoader(data, batch_size=4)",
        last="data.scale *= 0.99",
    ),
    "a count in a file": Script(
        first="""
            path = run.dir / "count"
            count = int(path.read_text()) if path.exists() else 0
            (new := path.with_suffix(".new")).write_text(str(count + 1))
            new.replace(path)  # whole: a kill within write_text would leave an empty file, which ends the script
        """,
        weigh="loss = loss * (1 + count % 7 / 9)",
    ),
    # -------------------------------------------------------------------------------------------------- generators
    "a generator of the loop": Script(
        setup="noise = torch.Generator().manual_seed(3)", first="x = x + 0.1 * torch.randn(x.shape, generator=noise)"
    ),
    "a generator in a class": of_data(
        "    own = random.Random(1)\n    def noise(self):\n        return self.own.random()"
    ),
    "a generator of a base class": of_data(
        "    own = random.Random(1)\n    def noise(self):\n        return self.own.random()\n"
        "class More(Items):\n    pass",
        "More",
    ),
    "a generator of a function": of_data(
        "    def noise(self):\n        return jitter()\nown = np.random.default_rng(1)\ndef jitter():\n"
        "    return float(own.normal())"
    ),
    "a generator of a layer": Script(
        IDENTICAL,
        before="""
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(2)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.own)
""",
        setup="model.append(Noise())",
    ),
    "augmentation in workers": of_data(
        "    def noise(self):\n        return random.random() + float(np.random.rand()) + torch.rand(())",
        workers=", num_workers=1, persistent_workers=True",
    ),
    "dropout's state": Script(IDENTICAL, first="x = nn.functional.dropout(x)"),
    # ------------------------------------------------------------------------------------------ the order of the data
    "an epoch's order, by torch": Script(
        IDENTICAL,
        prologue="order = torch.randperm(64)",
        steps="run.steps([(x, y) for x, y in zip(data.tensors[0][order].split(4), data.tensors[1][order].split(4))])",
    ),
    "an epoch's order, by numpy": Script(
        IDENTICAL, prologue="order = np.random.permutation(64)", first="x = data.tensors[0][order[:4]]"
    ),
    "an epoch's order, by random": Script(
        IDENTICAL, prologue="order = random.sample(range(64), 64)", first="x = data.tensors[0][order[:4]]"
    ),
    "an order that continues from the last one": Script(
        setup="order, own = [*range(64)], random.Random(1)",
        prologue="own.shuffle(order)",
        first="x = data.tensors[0][order[:4]]",
    ),
    "a second loader": Script(
        steps="zip(run.steps(loader), itertools.cycle(torch.utils.data.DataLoader(data, batch_size=3)))",
        first="(x, y), (more, _) = batch\nx = x + 0.1 * more[:1]",  # larger steps diverge after some resumes
    ),
    "an iterator of the loop": Script(
        setup="endless = itertools.cycle(torch.utils.data.DataLoader(data, batch_size=4))", first="x, y = next(endless)"
    ),
    "two batches a step, of a generator": Script(
        IDENTICAL,
        before="""
def pairs(loader):
    batches = iter(loader)
    for first in batches:
        yield first, next(batches)
""",
        steps="run.steps(pairs(loader))",
        first="(x, y), (more, _) = batch\nx = x + 0.1 * more",
    ),
    "a loader that counts its epochs": Script(
        before="""
class Counting:
    def __init__(self, data):
        self.data, self.epoch = data, 0

    def __iter__(self):
        self.epoch += 1
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        return ((self.data[i][0][None], self.data[i][1][None]) for i in order[:16].tolist())

    def __len__(self):
        return 16
""",
        setup="loader = Counting(data)",
    ),
    "a batch that is drawn ahead": Script(
        setup="ahead = torch.rand(4, 8)", first="x = ahead", last="ahead = torch.rand(4, 8)"
    ),
    "the number of enumerate": Script(
        steps="enumerate(run.steps(loader))", first="number, (x, y) = batch", weigh="loss = loss * (1 + number % 7 / 9)"
    ),
    "the length of islice": Script(steps="itertools.islice(run.steps(loader), 12)"),
    # ------------------------------------------------------------------------- what must not, or cannot, be different
    "a time that is logged": Script(IDENTICAL, last="run.log(now=time.time())"),
    "steps of the optimizer, every fourth": Script(IDENTICAL, step="if run.every(4): optimizer.step()"),
    "an average that nothing shows": Script(
        IDENTICAL,  # of all that a check sees nothing depends on it: docs/lifecycle.md
        setup="average = torch.optim.swa_utils.AveragedModel(model)",
        last="average.update_parameters(model)",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("forgotten", SCRIPTS)
def test_what_a_loop_forgets_is_found_or_held(forgotten: str, tmp_path: Path) -> None:
    script = SCRIPTS[forgotten]
    (tmp_path / "train.py").write_text(script.text())
    done = command(tmp_path / "runs", "train.py", "--json", project=tmp_path)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    # A replaced optimizer ends the saves: the report says so, whether a kill has shown a difference before or not.
    if "replaced" in forgotten and report["verdict"] == PROVES_NOTHING:
        assert "an optimizer that was handed over and makes no step any more" in report["nothing"]
        return
    assert report["verdict"] == script.verdict, report
    # A difference is of a resume, and not of two runs that differ anyway.
    assert (report["broken"] is not None) == (script.verdict == DIFFERENT), report
    assert all(RunDir(Path(run)).config.exists() for run in report["runs"]) == (script.verdict == DIFFERENT)
