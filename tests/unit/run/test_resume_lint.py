"""A loop that numbers its steps by Python's enumerate is warned of at submission, with the line to write instead."""

from pathlib import Path

import pytest

from toolkit.config import JobConfig
from toolkit.config.source import PythonSource
from toolkit.run.prepare.new_run import check_submittable
from toolkit.run.prepare.resume_lint import lint_loops

SCRIPT = """import toolkit
with toolkit.start() as run:
    for epoch in run.epochs(3):
        {line}
            {body}
"""


def warnings(line: str, body: str) -> list[str]:
    return [*lint_loops(PythonSource(Path("loop.py"), SCRIPT.format(line=line, body=body).encode()))]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("for i, x in enumerate(run.steps(data)):", "for i, x in run.steps(data).enumerate():"),
        ("for i, (x, y) in enumerate(run.steps(data), 1):", "for i, (x, y) in run.steps(data).enumerate(1):"),
        (
            "for i, x in enumerate(run.steps(data, total=9), start=n):",
            "for i, x in run.steps(data, total=9).enumerate(n):",
        ),
        ("for i, x in enumerate(tqdm(run.steps(data))):", "i = run.batch"),
        ("for i, x in enumerate(bar(run.steps(data, total=9), 5), 1):", "i = run.step + 1"),
    ],
)
def test_a_loop_that_counts_by_enumerate_is_told_what_to_write(line: str, instead: str) -> None:
    (warning,) = warnings(line, "rate = 0.1 * i")
    assert warning.startswith("loop.py, line 4: after a resume ")
    assert f"; write `{instead}`" in warning
    flat = f"import toolkit\nrun = toolkit.start()\n{line}\n    print(i)"
    assert len([*lint_loops(PythonSource(Path("flat.py"), flat.encode()))]) == 1
    if instead.startswith("for"):
        assert warnings(instead, "rate = 0.1 * i") == []
    assert warnings("for () in zip(run.steps(loader)):", "pass") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("for i, x in zip(range(9), run.steps(data)):", "zip begins the others at their start again"),
        ("for x, y in zip(self.run.steps(data), other):", "zip begins the others at their start again"),
        ("for x in itertools.islice(run.steps(data), 5):", "islice counts from 0 again"),
        ("for _ in range(9): x = next(iter(run.steps(data)))", "fewer batches are left than next() is called for"),
        ("it = iter(run.steps(data))\n        for _ in range(9): next(it)", "fewer batches are left"),
        (
            "for i, x in enumerate(trainer.run.steps(data)): print(i)",
            "for i, x in trainer.run.steps(data).enumerate():",
        ),
    ],
)
def test_what_counts_beside_the_steps_is_told_what_to_write(line: str, words: str) -> None:
    script = f"import itertools, toolkit\nwith toolkit.start() as run:\n    for epoch in run.epochs(3):\n        {line}"
    (warning,) = lint_loops(PythonSource(Path("loop.py"), f"{script}{' pass' * line.endswith(':')}\n".encode()))
    assert words in warning


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("for i, x in enumerate(run.steps(data)):", "train(x)"),
        ("for _, x in enumerate(run.steps(data)):", "i = 3"),
        ("for i, x in enumerate(data):", "train(i)"),
        ("for i, x in enumerate(pipeline.steps(data)):", "train(i)"),
        ("for i, x in enumerate(x for x in run.steps(data)):", "train(i)"),
        ("for x in run.steps(enumerate(data)):", "train(x)"),
        ("for x in enumerate(run.steps(data)):", "train(x)"),
        ("for i, x in mine.enumerate(run.steps(data)):", "train(i)"),
        ("for i, x in enumerate():", "train(i)"),
    ],
)
def test_other_loops_are_not_warned_of(line: str, body: str) -> None:
    assert warnings(line, body) == []


COUNTED = """import toolkit
def train(run):
    n = 0
    {before}
    for epoch in run.epochs(3):
        for x in run.steps(data):
            n += 1
            {body}
"""


@pytest.mark.parametrize(
    ("body", "is_warned"),
    [
        ("if n % 100 == 0: log()", True),
        ("if n >= args.most: break", True),
        ("rate(n)", True),
        ("writer.add_scalar('loss', loss, global_step=n)", True),
        ("if n >= 5: measure()", False),
        ("mean = total / n", False),
        ("n = 0\n            log(n)", False),
        ("", False),
    ],
)
def test_a_counter_that_a_loop_goes_by_is_named(body: str, is_warned: bool) -> None:
    def warned(before: str = "", text: str = COUNTED) -> list[str]:
        return [*lint_loops(PythonSource(Path("loop.py"), text.format(before=before, body=body).encode()))]

    assert [each.startswith("loop.py, line 7: after a resume 'n' counts from its start") for each in warned()] == (
        [True] if is_warned else []
    )
    for before in ("n = run.step", "run.resumable(model=model, n=n)", "global n"):
        assert warned(before) == []
    assert warned(text=COUNTED.replace("n = 0", "n = run.step")) == []
    assert warned(text=COUNTED.replace("run.steps(data)", "data")) == []


TRAINER = """import toolkit
class Trainer:
    def __init__(self, model):
        self.model, self.run = model, toolkit.start()
        self.step = 0
        self.run.resumable({handed})
    def load_state_dict(self, state):
        {loads}
    def train(self):
        for epoch in self.run.epochs(3):
            for x in self.run.steps(data):
                self.step += 1
                if self.step % self.every == 0: log()
"""


@pytest.mark.parametrize(
    ("handed", "loads", "is_warned"),
    [
        ("model=self.model", "pass", True),
        ("model=self.model", "self.step = state['step']", False),
        ("model=self.model, trainer=self", "pass", False),
        ("model=self.model, values=vars(self)", "pass", False),
    ],
)
def test_a_counter_of_a_trainer_is_named(handed: str, loads: str, is_warned: bool) -> None:
    text = TRAINER.format(handed=handed, loads=loads).encode()
    told = [*lint_loops(PythonSource(Path("loop.py"), text))]
    assert ["line 12: after a resume 'self.step' counts" in each for each in told] == [True] * is_warned


def test_a_submission_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT.format(line="for i, x in enumerate(run.steps(data)):", body="print(i)"))
    for _ in range(2):
        check_submittable(JobConfig(job="loop.py"), "local", tmp_path)
    (warning,) = caplog.messages
    assert "write `for i, x in run.steps(data).enumerate():`" in warning
