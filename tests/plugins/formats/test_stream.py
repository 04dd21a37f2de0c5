import json
import multiprocessing
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.unit.data.streams import Lines, YieldedLines, length_of
from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import DataConfig
from toolkit.data.loader import Batches, Loader
from toolkit.data.randomness import seed_sample
from toolkit.plugins.formats.streams import StreamLoader, Streams
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.state import Json

SHARE = Share(1, 3)
STEPS = 9


def loader(make: Any = Lines, *, batch: int = 10, share: Share = SHARE, workers: int = 0) -> StreamLoader:
    return StreamLoader(make, dataset_size=24, global_batch_size=batch, seed=3, share=share, workers=workers)


def batch_at(source: StreamLoader, step: int) -> Batch:
    batch = source.at(step)
    assert batch is not None
    return batch


def seen(batch: Batch) -> tuple[Any, ...]:
    return batch.inputs.tolist(), batch.targets.tolist(), batch.positions.tolist(), batch.global_count


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[Any, ...]]:
    source = loader()
    return [seen(batch_at(source, step)) for step in range(STEPS)]


def test_a_share_reads_its_own_stream_epoch_after_epoch_and_each_epoch_whole(undisturbed: list[Any]) -> None:
    targets = [target for _, targets, _, _ in undisturbed for target in targets]
    size = length_of(SHARE)
    assert len(targets) >= 3 * size
    for epoch in range(3):
        assert sorted(targets[epoch * size : (epoch + 1) * size]) == [100 + line for line in range(size)]
    assert targets[:size] != targets[size : 2 * size], "each epoch has its own order"


def test_samples_of_a_stream_have_the_positions_and_seeds_of_an_indexed_data_set(
    undisturbed: list[Any],
) -> None:
    indexed = Loader(range(100), global_batch_size=10, seed=3, share=SHARE)
    source = loader()
    for step, (inputs, _, positions, count) in enumerate(undisturbed):
        part = indexed._sampler.at(step)
        assert positions == part.positions().tolist() == source.sample_indices(step)
        assert count == 10
        for row, position in zip(inputs, positions, strict=True):
            seed_sample(3, position)
            assert row == (torch.rand(4) + random.random() + np.random.normal()).tolist()


@pytest.mark.parametrize("kind", [Lines, YieldedLines])
def test_a_resume_at_any_step_gives_exactly_the_samples_that_would_have_followed(
    undisturbed: list[Any], kind: Any
) -> None:
    saved = loader(kind)
    for step in range(STEPS - 1):
        assert seen(batch_at(saved, step)) == undisturbed[step]
        resumed = loader(kind)
        resumed.at(0)  # on which a strategy is primed
        resumed.restore(json.loads(json.dumps(saved.state())))
        with pytest.raises(ValueError, match="read in order"):
            resumed.at(0)
        assert [seen(batch_at(resumed, next_step)) for next_step in range(step + 1, STEPS)] == undisturbed[step + 1 :]
        assert resumed.state() != saved.state()


def test_a_worker_that_is_ahead_changes_nothing(undisturbed: list[Any]) -> None:
    with closing(loader(YieldedLines, workers=3)) as saved:
        for step in range(4):
            assert seen(batch_at(saved, step)) == undisturbed[step]
        assert len(multiprocessing.active_children()) == 1, "several would give another order"
        state = saved.state()
    assert multiprocessing.active_children() == []
    with closing(loader(YieldedLines, workers=1)) as resumed:
        resumed.at(0)
        resumed.restore(state)
        assert [seen(batch_at(resumed, step)) for step in range(4, STEPS)] == undisturbed[4:]


def test_a_worker_whose_priming_was_the_step_before_the_resume_begins_anew(undisturbed: list[Any]) -> None:
    other: Json = {"next_step": 1, "stream": {"epoch": 1, "taken": 2}, "share": [1, 3]}
    with closing(loader(workers=1)) as resumed:
        resumed.at(0)
        resumed.restore(other)
        assert seen(batch_at(resumed, 1)) != undisturbed[1]
        with closing(loader()) as alone:
            alone.restore(other)
            assert torch.equal(batch_at(alone, 1).inputs, torch.tensor(undisturbed[1][0]))  # the same positions
            assert alone.state() == resumed.state()


def test_the_position_of_another_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this rank read share 2 of 4 .* and has share \d of \d now"):
        loader().restore({"next_step": 1, "stream": {"epoch": 1, "taken": 2}, "share": [2, 4]})


def test_the_batch_that_a_strategy_is_primed_on_is_step_0(undisturbed: list[Any]) -> None:
    source = loader()
    assert [seen(batch_at(source, step)) for step in (0, 0, 1)] == [undisturbed[0], undisturbed[0], undisturbed[1]]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_step_out_of_order_is_refused(step: int) -> None:
    source = loader()
    for before in (0, 1):
        source.at(before)
    with pytest.raises(ValueError, match=f"read in order: step {step} was asked for, and 2 is the next one"):
        source.at(step)


def test_loading_leaves_the_process_generators_as_they_were() -> None:
    state = torch.get_rng_state()
    loader().at(0)
    assert torch.equal(torch.get_rng_state(), state)


class Empty(Lines):
    def __next__(self) -> Any:
        raise StopIteration


class Torn(Lines):
    def sample(self, number: int) -> Any:
        if number == 2:
            raise OSError("truncated record")
        return super().sample(number)


class Opaque(Lines):
    def state_dict(self) -> Any:
        return {"generator": torch.Generator()}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Empty, r"position 3: ValueError: it ended twice without a sample"),
        (Torn, r"position 5: OSError: truncated record"),
        (Opaque, r"TypeError: .*not JSON serializable"),
    ],
)
def test_what_a_stream_raises_is_told_with_its_share_and_position(kind: Any, message: str, workers: int) -> None:
    with (
        closing(loader(kind, workers=workers)) as source,
        pytest.raises(JobFailedError, match=rf"^the stream of share 1 of 3 failed at .*{message}"),
    ):
        source.at(0)


def test_fewer_samples_than_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.global_batch_size: 2 samples cannot be shared by 3 streams"):
        loader(batch=2)


def test_a_rank_that_has_no_share_gets_none_and_saves_that() -> None:
    def never(share: Share, seed: int) -> Iterator[Any]:
        raise AssertionError("it has no stream")

    source = loader(never, share=Share(0, 0))
    assert (source.at(0), source.at(1), source.sample_indices(1)) == (None, None, [])
    again = loader(never, share=Share(0, 0))
    again.restore(source.state())
    assert again.at(2) is None


def test_the_config_says_how_streams_are_read() -> None:
    config = DataConfig(global_batch_size=10)
    built: Batches = Streams(Lines, 24).loader_of_share(config, SHARE, seed=3, device="meta")
    assert (built.dataset_size, built.global_batch_size, built.max_bad_samples) == (24, 10, None)
    assert built.at(0).inputs.device.type == "meta"
    config.bad_samples = "skip"
    with pytest.raises(ConfigError, match=r"data.bad_samples: skip needs a data set with an index"):
        Streams(Lines, 24).loader_of_share(config, SHARE, seed=3)


@pytest.mark.parametrize("more", [{"partition": "hash"}, {"balance": "auto"}])
def test_streams_keep_their_shares(more: Any) -> None:
    with pytest.raises(ConfigError, match="a stream of its own"):
        Streams(lambda *_: cast(Any, None), 9).loader_of_share(DataConfig(**more), Share(0, 1), seed=0)
