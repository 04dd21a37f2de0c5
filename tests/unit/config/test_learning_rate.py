import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import JobConfig, load_config
from toolkit.config.learning_rate import (
    RateChange,
    build_schedule,
    rate_change,
    rate_change_by,
    rates_at,
    schedule_settings,
    total_steps,
)

SAMPLES, BATCH = 100, 10
COSINE = ["optim.schedule=cosine", "optim.lr=0.1", "train.epochs=2"]


def config_of(tmp_path: Path, *overrides: str) -> JobConfig:
    path = tmp_path / "a.yaml"
    path.write_text(f"job: jobs/classify.py\ndata: {{global_batch_size: {BATCH}}}\n")
    return load_config(path, list(overrides), site=False)


def steps_of(config: JobConfig) -> int:
    return total_steps(config.train, SAMPLES, BATCH)


def rate_of(config: JobConfig, step: int) -> float:
    return build_schedule(config.optim, steps_of(config))(step)


def saved_by(config: JobConfig, step: int) -> dict[str, Any]:
    return rates_at(lambda n: rate_of(config, n), step, schedule_settings(config), SAMPLES)


def said(saved: Any, step: int, now: JobConfig) -> RateChange | None:
    """Return what a rank says, which is what is said before the run is queued."""
    change = rate_change(saved, step, rate_of(now, step), steps_of(now), schedule_settings(now), "RUN")
    assert rate_change_by(saved, step, now, "RUN") == change
    return change


def test_a_longer_run_is_told_of_its_rate_and_its_commands_keep_it_or_let_it_fall(tmp_path: Path) -> None:
    saved, longer = saved_by(config_of(tmp_path, *COSINE), 20), [*COSINE, "train.epochs=4"]
    change = said(saved, 20, config_of(tmp_path, *longer))
    assert not change.is_asked
    pattern = (
        r"the learning rate was 0\.0006156 at step 20, and is 0\.05 from the next step on: train\.epochs was 2 and is "
        r"4\. To keep it: `toolkit cancel RUN`, then `toolkit resume RUN ([^`]*)`; to let it fall from there to "
        r"optim\.min_lr: (.*)"
    )
    match = re.fullmatch(pattern, change.text)
    assert match, change.text
    kept, falling = (config_of(tmp_path, *longer, *shlex.split(words)) for words in match.groups())
    assert [rate_of(kept, step) for step in (20, 39)] == [pytest.approx(saved["last"], rel=1e-5)] * 2
    assert rate_of(falling, 20) == pytest.approx(saved["last"], rel=1e-5)
    assert rate_of(falling, 30) == pytest.approx(saved["last"] / 2, rel=1e-5)
    # Who follows the advice is told that the rate is as it was: nothing.
    assert said(saved, 20, kept) is None
    assert said(saved, 20, falling) is None


@pytest.mark.parametrize(
    ("begun", "changed", "step"),
    [
        (["train.epochs=9", "train.max_steps=20"], "train.max_steps=90", 19),
        (["optim.warmup_steps=4"], "optim.warmup_steps=40", 10),
        (["optim.min_lr=0.01"], "optim.schedule=linear", 15),
        (["optim.min_lr=0.01"], "train.epochs=40", 10),
        (["optim.schedule=wsd", "optim.decay_steps=10", "optim.min_lr=0.01"], "optim.decay_steps=4", 15),
        (["optim.schedule=wsd", "optim.warmup_steps=4"], "train.epochs=3", 19),
    ],
)
def test_each_key_of_a_schedule_is_named_and_the_advice_fits_it(
    tmp_path: Path, begun: list[str], changed: str, step: int
) -> None:
    saved = saved_by(config_of(tmp_path, *COSINE, *begun), step)
    change = said(saved, step, config_of(tmp_path, *COSINE, *begun, changed))
    key, value = changed.split("=")
    assert f"{key} was " in change.text
    assert f" and is {value}" in change.text
    match = re.search(r"resume RUN ([^`]*)`(?:.*optim\.min_lr: (.*))?", change.text)
    assert match, change.text
    for words in match.groups():
        config = config_of(tmp_path, *COSINE, *begun, changed, *shlex.split(words or ""))
        assert rate_of(config, step) == pytest.approx(saved["last"], rel=1e-5)
        assert said(saved, step, config) is None or words is None


@pytest.mark.parametrize(
    ("begun", "changed"),
    [
        ([], "train.log_every=3"),
        (["optim.schedule=constant"], "train.epochs=40"),
        (["optim.warmup_steps=15"], "train.epochs=40"),  # the warm-up is the same
        (["train.epochs=9", "train.max_steps=20"], "train.epochs=12"),
        ([], "train.epochs=1"),  # nothing is left to train
    ],
)
def test_nothing_is_said_of_a_rate_that_goes_on_as_it_would_have(
    tmp_path: Path, begun: list[str], changed: str
) -> None:
    saved = saved_by(config_of(tmp_path, *COSINE, *begun), 12)
    assert said(saved, 12, config_of(tmp_path, *COSINE, *begun, changed)) is None


def test_a_rate_that_was_asked_for_is_a_plain_line(tmp_path: Path) -> None:
    change = said(saved_by(config_of(tmp_path, *COSINE), 10), 10, config_of(tmp_path, *COSINE, "optim.lr=0.2"))
    assert change == RateChange(
        "the learning rate was 0.05782 at step 10, and is 0.1 from the next step on: optim.lr was 0.1 and is 0.2", True
    )


def test_a_jobs_own_schedule_is_told_by_the_ranks_alone_and_without_keys_to_set(tmp_path: Path) -> None:
    config = config_of(tmp_path, *COSINE)
    saved = rates_at(lambda step: 0.3 / (1 + step), 10, schedule_settings(config), SAMPLES)
    longer = config_of(tmp_path, *COSINE, "train.epochs=4")
    assert rate_change_by(saved, 10, longer, "RUN") is None
    change = rate_change(saved, 10, 0.3, 40, schedule_settings(longer), "RUN")
    assert change.text.endswith("0.3 from the next step on: train.epochs was 2 and is 4")


def test_a_checkpoint_of_a_users_own_loop_says_nothing(tmp_path: Path) -> None:
    assert rate_change_by(None, 10, config_of(tmp_path, *COSINE), "RUN") is None
