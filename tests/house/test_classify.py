"""The image classifier beside torch's own losses.

Its recipe is compared with the one that torchvision has published.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torchvision.models import ResNet50_Weights, resnet50
from torchvision.ops._utils import split_normalization_params

import toolkit
from jobs.classify import Classify, Params
from jobs.models import build_model
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, load_config
from toolkit.config.learning_rate import build_schedule
from toolkit.strategies.objective import Objective
from toolkit.train.optim import build_optimizer

ROOT = Path(__file__).parents[2]

#: The command for ResNet-50's weights IMAGENET1K_V2 (80.858 % top-1), as published with them:
#: https://github.com/pytorch/vision/tree/main/references/classification, and
#: https://pytorch.org/blog/how-to-train-state-of-the-art-models-using-torchvision-latest-primitives/
RECIPE = """--model resnet50 --batch-size 128 --lr 0.5 --lr-scheduler cosineannealinglr --lr-warmup-epochs 5
--lr-warmup-method linear --auto-augment ta_wide --epochs 600 --random-erase 0.1 --weight-decay 0.00002
--norm-weight-decay 0.0 --label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 --train-crop-size 176 --model-ema
--val-resize-size 232 --ra-sampler --ra-reps 4"""
#: Flags that it leaves at the script's defaults, with which torchrun starts eight processes.
DEFAULTS = """--nproc-per-node 8 --opt sgd --momentum 0.9 --val-crop-size 224 --interpolation bilinear
--lr-warmup-decay 0.01 --lr-min 0.0 --model-ema-steps 32 --model-ema-decay 0.99998"""
IMAGES = 1_281_167


def flags(text: str) -> dict[str, str]:
    words = text.replace("--model-ema\n", "--model-ema on ").replace("--ra-sampler ", "--ra-sampler on ").split()
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.fixture(scope="module")
def published() -> dict[str, str]:
    return flags(DEFAULTS) | flags(RECIPE)


@pytest.fixture(scope="module")
def recipe() -> JobConfig:
    return load_config(ROOT / "configs/imagenet_resnet50.yaml", site=False)


def test_the_recipe_has_each_value_of_the_published_one(recipe: JobConfig, published: dict[str, str]) -> None:
    number = {name: float(value) for name, value in published.items() if value.replace(".", "", 1).isdigit()}
    ranks = int(number["nproc-per-node"])
    ours: dict[str, Any] = {
        "nproc-per-node": recipe.cluster.nodes * recipe.cluster.tasks_per_node,
        "model": recipe.model.name,
        "batch-size": recipe.data.global_batch_size / ranks,
        "epochs": recipe.train.epochs,
        "opt": recipe.optim.name,
        "lr": recipe.optim.lr,
        "momentum": recipe.optim.momentum,
        "weight-decay": recipe.optim.weight_decay,
        "norm-weight-decay": recipe.optim.weight_decay if recipe.optim.decay_norms_and_biases else 0.0,
        "lr-scheduler": {"cosine": "cosineannealinglr"}[recipe.optim.schedule],
        "lr-warmup-epochs": round(recipe.optim.warmup_steps * recipe.data.global_batch_size / IMAGES, 2),
        "lr-warmup-method": "linear",  # the only one there is
        "lr-min": recipe.optim.min_lr,
        "label-smoothing": recipe.params["label_smoothing"],
        "mixup-alpha": recipe.params["mixup"],
        "cutmix-alpha": recipe.params["cutmix"],
        "auto-augment": {"trivial_augment": "ta_wide"}[recipe.data.images.policy],
        "random-erase": recipe.data.images.erase,
        "interpolation": recipe.data.images.interpolation,
        "train-crop-size": recipe.data.image_size,
        "val-resize-size": recipe.data.images.val_resize,
        "val-crop-size": recipe.data.images.val_size,
        "ra-reps": recipe.data.augment_repeats,
    }
    alone = {"model-ema", "model-ema-steps", "model-ema-decay", "ra-sampler", "lr-warmup-decay"}  # tested below
    assert set(published) - set(ours) == alone
    assert {name: ours[name] for name in ours} == {name: number.get(name, published[name]) for name in ours}
    assert recipe.data.augment


def test_the_recipes_eval_images_are_those_of_the_published_weights(recipe: JobConfig) -> None:
    theirs = ResNet50_Weights.IMAGENET1K_V2.transforms()
    images = recipe.data.images
    assert (theirs.crop_size, theirs.resize_size) == ([images.val_size], [images.val_resize])
    assert theirs.interpolation.value == images.interpolation


def test_the_recipes_average_forgets_as_the_published_one(recipe: JobConfig, published: dict[str, str]) -> None:
    """As in references/classification/train.py. The decay over these steps is adjusted to the batch and the epochs."""
    steps, batch = int(published["model-ema-steps"]), int(published["batch-size"]) * int(published["nproc-per-node"])
    alpha = (1 - float(published["model-ema-decay"])) * batch * steps / int(published["epochs"])
    assert recipe.train.ema_decay is not None
    assert recipe.train.ema_decay**steps == pytest.approx(1 - alpha, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 warns of what it calls itself
def test_the_recipes_rate_is_that_of_torchs_schedulers(recipe: JobConfig, published: dict[str, str]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=float(published["lr"]))
    warm, epochs = int(published["lr-warmup-epochs"]), int(published["epochs"])
    rise = LinearLR(optimizer, float(published["lr-warmup-decay"]), total_iters=warm)
    theirs = SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, epochs - warm)], [warm])
    steps_per_epoch = IMAGES / recipe.data.global_batch_size
    ours = build_schedule(recipe.optim, round(epochs * steps_per_epoch))
    for epoch in range(epochs):
        # Theirs begins the warm-up at a hundredth, and changes between epochs only.
        assert ours(round(epoch * steps_per_epoch)) == pytest.approx(optimizer.param_groups[0]["lr"], abs=0.006)
        optimizer.step()
        theirs.step()


def test_the_recipe_decays_the_parameters_that_the_published_one_decays(recipe: JobConfig) -> None:
    with torch.device("meta"):
        model = resnet50()
    norms, others = split_normalization_params(model)
    groups = build_optimizer(recipe.optim, model).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    spared = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    assert decayed == {id(parameter) for parameter in others}
    assert spared == {id(parameter) for parameter in norms}


def job_of(tmp_path: Path, **params: float) -> Classify:
    return Classify(JobConfig(), Params(**params), tmp_path, torch.device("cpu"))


def first_batch(job: Classify, size: int = 8) -> toolkit.Batch:
    inputs, targets = job.data.train.batch(torch.arange(size).numpy())  # type: ignore[union-attr]
    return toolkit.Batch((inputs, targets), torch.arange(size), global_count=size)


def test_the_loss_is_torchs_with_smoothed_and_mixed_targets(tmp_path: Path) -> None:
    plain, mixed = job_of(tmp_path, label_smoothing=0.1), job_of(tmp_path, label_smoothing=0.1, mixup=0.4, cutmix=1.0)
    batch, model = first_batch(plain), plain.model()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    expected = criterion(model(batch.inputs), batch.targets)
    assert torch.allclose(Objective(plain.loss)(model, batch)[""].total / 8, expected)
    images, shares = toolkit.PairMixing(mixup=0.4, cutmix=1.0, classes=10, seed=0)(batch)
    assert torch.allclose(Objective(mixed.loss)(model, batch)[""].total / 8, criterion(model(images), shares))


def test_without_params_the_loss_is_the_plain_one(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    batch, model = first_batch(job), job.model()
    expected = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
    assert torch.allclose(job.loss(model, batch).total / 8, expected)


def test_top5_counts_the_samples_whose_class_is_among_five(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert "top5" not in job.evaluate(job.model(), first_batch(job))
    object.__setattr__(job.data, "classes", 100)
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    logits[:4] += 9 * one_hot(first_batch(job).targets, 100)[:4]
    figures = job.evaluate(lambda inputs: logits, first_batch(job))
    by_hand = [
        target in sorted(range(100), key=lambda c, row=row: -float(row[c]))[:5]  # type: ignore[misc]
        for row, target in zip(logits, first_batch(job).targets.tolist(), strict=True)
    ]
    assert figures["top5"].tolist() == by_hand
    assert 4 <= sum(by_hand) < 8


@pytest.mark.parametrize("params", [{"label_smoothing": 1.5}, {"mixup": -1.0}, {"cutmix": 1000.0}])
def test_params_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"params.{next(iter(params))}: .* is out of range"):
        Params(**params)


def test_models_of_one_size_refuse_another_in_evaluation() -> None:
    for name, shape in (("lenet", (3, 32, 32)), ("vit_b_16", (3, 64, 64))):
        with pytest.raises(ConfigError, match=r"data\.images\.val_size"):
            build_model(name, 10, shape, (3, 96, 96))
