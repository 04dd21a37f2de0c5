"""An evaluation's figures: their means, and the refusal of figures that not every batch has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import load_config
from toolkit.metrics.sinks import FanOut, JsonlSink, TensorBoardSink
from toolkit.plugins.inference.trained_model import OneProcess
from toolkit.ranks.batch import Batch
from toolkit.strategies.objective import Loss, Measure, Rows
from toolkit.strategies.protocol import Strategy
from toolkit.train import run_job
from toolkit.train.evaluate import evaluate
from toolkit.train.job import Job

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
        return {"loss": batch.data} | {name: Rows(batch.data) for name in here}

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
    assert figures is not None
    assert figures["some"] == 1.0
    assert math.isnan(figures["none"])


def test_an_eval_set_with_fewer_samples_than_ranks_is_refused_before_the_training() -> None:
    with pytest.raises(ConfigError, match="eval_set\\(\\) has 1 samples, fewer than the 2 ranks; use"):
        run_job.evaluation(cast(Any, None), VALUES[:1], ranks=2)


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
    run_job.Training(job, cast(Strategy, Alone()), cast(Any, trainer), lambda sink: None, sink.close).fit()
    sink.close()
    return job, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_be_shown_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, (line,) = shown(tmp_path)
    assert sum(line["scores"].values()) == len(VALUES)
    assert "'rgba' is not logged: AssertionError" in caplog.text


def test_a_job_with_a_show_is_asked_for_its_eval_set_once(tmp_path: Path) -> None:
    job, _ = shown(tmp_path)
    assert job.asked == 1
