"""The transforms for photographs, beside torchvision's reference.

The reference is built from torchvision's older classes as published.
"""

import ctypes
import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.models import ResNet50_Weights
from torchvision.transforms.functional import InterpolationMode

import toolkit
from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig, ImageConfig, JobConfig, validate
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import Loader
from toolkit.data.randomness import seed_sample
from toolkit.nodes.agent import state_memory
from toolkit.plugins.formats.images.photographs import PairMixing, PixelCache, read_pixels
from toolkit.ranks.batch import Share

v2: Any = import_module("torchvision.transforms.v2")  # whose names have no types
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """Return a smooth image with some noise that is not square."""
    draw = np.random.default_rng(0)
    waves = np.sin(np.arange(90)[:, None, None] / 9 + np.arange(120)[None, :, None] / 14 + np.arange(3))
    return Image.fromarray((127 + 90 * waves + draw.normal(0, 12, (90, 120, 3))).clip(0, 255).astype(np.uint8))


def reference(policy: str, erase: float, interpolation: str, *, on_tensors: bool = False) -> Any:
    """Return the transforms of ClassificationPresetTrain, with --use-v2 for the policy.

    From references/classification/presets.py of torchvision. (The older classes of the policies draw the sign of a
    change in another way.) With ``on_tensors`` the crop and mirroring are those of torchvision's tensor backend, and
    the policy is not.
    """
    mode = InterpolationMode(interpolation)
    policies: dict[str, list[Any]] = {
        "none": [],
        "rand_augment": [v2.RandAugment(interpolation=mode, magnitude=9)],
        "trivial_augment": [v2.TrivialAugmentWide(interpolation=mode)],
        "augmix": [v2.AugMix(interpolation=mode, severity=3)],
        "auto_augment": [v2.AutoAugment(policy=v2.AutoAugmentPolicy("imagenet"), interpolation=mode)],
    }
    steps: list[Any] = [v1.RandomResizedCrop(48, interpolation=mode), v1.RandomHorizontalFlip(0.5)]
    if on_tensors:
        steps = [v1.PILToTensor(), v2.RandomResizedCrop(48, interpolation=mode), v2.RandomHorizontalFlip(0.5)]
        steps.append(v1.ToPILImage())
    steps += [*policies[policy], v1.PILToTensor(), v1.ConvertImageDtype(torch.float), v1.Normalize(mean=MEAN, std=STD)]
    return v2.Compose([*steps, *([v1.RandomErasing(p=erase)] if erase else [])])


def differences(
    root: Path, photograph: Image.Image, policy: str, interpolation: str, *, on_tensors: bool
) -> torch.Tensor:
    """Return how far each pixel is from the reference's, in levels of 255. Of eight images, by position."""
    write_folder(root, photograph)
    images = ImageConfig(policy=policy, erase=0.5, interpolation=interpolation)
    sets = build_datasets(DataConfig("image_folder", str(root), image_size=48, augment=True, images=images))
    loader = Loader(sets.train, global_batch_size=8, seed=0, share=Share(0, 1))
    theirs, found = reference(policy, 0.5, interpolation, on_tensors=on_tensors), []
    with Image.open(root / "train/cat/0.jpg") as image:
        opened = image.convert("RGB")
    for position, (batched, index) in enumerate(zip(loader.at(0).inputs, loader.sample_indices(0), strict=True)):
        seed_sample(0, position)
        expected = theirs(opened)
        if position == 0:
            seed_sample(0, position)
            assert torch.equal(sets.train[index][0], batched)  # type: ignore[index]
        found.append((batched - expected) * torch.tensor(STD).view(3, 1, 1) * 255)
    return torch.stack(found).abs()


@pytest.mark.parametrize(
    ("policy", "interpolation"),
    [
        *((name, "bicubic") for name in ("none", "rand_augment", "trivial_augment", "auto_augment")),
        *((name, "bilinear") for name in ("none", "augmix")),
    ],
)
def test_training_images_are_those_of_torchvisions_reference(
    policy: str, interpolation: str, photograph: Image.Image, tmp_path: Path
) -> None:
    assert differences(tmp_path, photograph, policy, interpolation, on_tensors=True).max() < 1e-4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_images_differ_from_pillows_by_one_level_at_most(
    interpolation: str, photograph: Image.Image, tmp_path: Path
) -> None:
    assert differences(tmp_path, photograph, "none", interpolation, on_tensors=False).max() < 1.01


def write_folder(root: Path, photograph: Image.Image) -> None:
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / name).mkdir(parents=True)
        photograph.save(root / name / "0.jpg")


def test_evaluated_images_are_those_of_torchvisions_weights(tmp_path: Path, photograph: Image.Image) -> None:
    write_folder(tmp_path, photograph)
    images = ImageConfig(val_size=224, val_resize=232)
    sets = build_datasets(DataConfig("image_folder", str(tmp_path), image_size=176, augment=True, images=images))
    theirs = ResNet50_Weights.IMAGENET1K_V2.transforms()
    with Image.open(tmp_path / "val/cat/0.jpg") as image:
        expected = theirs(image.convert("RGB"))
    assert torch.allclose(sets.eval[0][0], expected, atol=1e-5)  # type: ignore[index]
    assert sets.train[0][0].shape == (3, 176, 176)  # type: ignore[index]
    assert torch.equal(sets.pictures.read(tmp_path / "val/cat/0.jpg"), sets.eval[0][0])  # type: ignore[index]


def test_erasing_follows_its_probability(photograph: Image.Image, tmp_path: Path) -> None:
    write_folder(tmp_path, photograph)
    config = DataConfig("image_folder", str(tmp_path), image_size=32, augment=True, images=ImageConfig(erase=0.25))
    loader = Loader(build_datasets(config).train, global_batch_size=200, seed=0, share=Share(0, 1))
    assert 30 <= (loader.at(0).inputs == 0).all(1).any(2).any(1).sum() <= 70


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataConfig("digits", images=ImageConfig(val_size=16)), r"data\.images: .* for data\.name image_folder"),
        (DataConfig("image_folder", images=ImageConfig(policy="augmix")), r"data\.images\.policy: .*data\.augment"),
        (DataConfig("image_folder", images=ImageConfig(erase=0.1)), r"data\.images\.erase: .*data\.augment"),
        (DataConfig("image_folder", images=ImageConfig(cache_gb=1)), r"data\.images\.cache_gb: .*data\.augment"),
        (DataConfig("image_folder", images=ImageConfig(val_size=224, val_resize=200)), r"val_resize: 200 is less"),
        (DataConfig("image_folder", images=ImageConfig(policy="ta_wide")), r"data\.images\.policy.*trivial_augment"),
        (
            DataConfig("image_folder", augment=True, images=ImageConfig("augmix", interpolation="bicubic")),
            r"data\.images\.interpolation: .*augmix",
        ),
        (DataConfig(augment_repeats=2, partition="blocks"), r"data\.augment_repeats: does not go with data\.partition"),
    ],
)
def test_keys_that_change_nothing_or_do_not_fit_are_refused(data: DataConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(JobConfig(data=data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_has_the_pixels_that_pillow_reads(mode: str, tmp_path: Path, photograph: Image.Image) -> None:
    path = tmp_path / "one.jpg"
    photograph.convert(mode).save(path, quality=85)
    with Image.open(path) as image:
        expected = v2.functional.pil_to_tensor(image.convert("RGB"))
    assert torch.equal(read_pixels(str(path)).permute(2, 0, 1), expected)


def test_without_torchvisions_operator_pillow_decodes(
    tmp_path: Path, photograph: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    photograph.save(tmp_path / "one.jpg")
    expected = read_pixels(str(tmp_path / "one.jpg"))
    monkeypatch.setattr(torch.ops, "image", object())
    assert torch.equal(read_pixels(str(tmp_path / "one.jpg")), expected)


def test_a_torn_or_damaged_file_is_refused_and_another_format_is_read(tmp_path: Path, photograph: Image.Image) -> None:
    whole, torn = tmp_path / "whole.jpg", tmp_path / "torn.jpg"
    photograph.save(whole)
    torn.write_bytes(whole.read_bytes()[:-700])
    (tmp_path / "none.jpg").write_bytes(b"no image")
    (tmp_path / "header.jpg").write_bytes(b"\xff\xd8\xff\xff\xd9")
    for name in ("torn", "none", "header"):
        with pytest.raises(OSError, match=r"truncated|cannot identify"):
            read_pixels(str(tmp_path / f"{name}.jpg"))
    photograph.save(tmp_path / "other.png")
    expected = v2.functional.pil_to_tensor(photograph)
    assert torch.equal(read_pixels(str(tmp_path / "other.png")).permute(2, 0, 1), expected)


def private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def test_memory_of_the_rank_and_its_worker_is_flat_over_five_epochs(tmp_path: Path, photograph: Image.Image) -> None:
    """If each sample's pixels were kept, the last three epochs would add 22 MiB."""
    write_folder(tmp_path, photograph)
    for number in range(1, 99):
        (tmp_path / f"train/cat/{number}.jpg").hardlink_to(tmp_path / "train/cat/0.jpg")
    sets = build_datasets(DataConfig("image_folder", str(tmp_path), image_size=160, augment=True))
    sizes = []
    with closing(Loader(sets.train, global_batch_size=20, seed=0, share=Share(0, 1), workers=1)) as loader:
        for epoch in range(5):
            for step in range(5 * epoch, 5 * epoch + 5):
                loader.at(step)
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps some 200 MiB of what was freed, in about half of all runs
            pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
            assert len(pids) == 2
            sizes.append(sum(private_mib(pid) for pid in pids))
    assert sizes[4] - sizes[1] < 6, sizes


def picture(number: int, height: int = 20) -> Tensor:
    return torch.full((height, 30, 3), number, dtype=torch.uint8)


def in_a_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a fork, which ends without any clean-up, as a killed one does."""
    pid = os.fork()
    if pid == 0:
        os._exit(work() is not None)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> state_memory.NodeFiles:
    files = state_memory.NodeFiles()
    monkeypatch.setenv(state_memory.PIXEL_FILE, files.pixel_file)
    return files


def test_what_does_not_fit_is_not_kept() -> None:
    cache = PixelCache(10, 3 * picture(0).numel() + 100, "a")
    for number in range(10):
        cache.put(number, picture(number))
    kept = [cache.get(number) for number in range(10)]
    assert [pixels is not None for pixels in kept] == [True] * 3 + [False] * 7
    assert all(torch.equal(pixels, picture(number)) for number, pixels in enumerate(kept) if pixels is not None)
    cache.put(9, picture(9)[:1, :10])  # a small one has room
    assert torch.equal(cache.get(9), picture(9)[:1, :10])


def test_ranks_of_a_node_share_one_cache_and_those_that_start_again_find_it(agent: state_memory.NodeFiles) -> None:
    in_a_child(lambda: PixelCache(4, 10_000, "a").put(2, picture(2)))
    again = PixelCache(4, 10_000, "a")
    assert torch.equal(again.get(2), picture(2))
    assert again.get(1) is None
    other = PixelCache(4, 10_000, "b")
    other.put(1, picture(7))
    assert (other.get(2), again.get(1)) == (None, None)


def test_a_worker_that_dies_with_the_lock_stops_nobody(agent: state_memory.NodeFiles) -> None:
    cache = PixelCache(4, 10_000, "a")
    in_a_child(lambda: cache._locked().__enter__())
    cache.put(0, picture(3))
    assert torch.equal(cache.get(0), picture(3))


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.images\.cache_gb: .* is more than the .* GB of memory"):
        PixelCache(4, 1 << 50, "a")


def test_the_second_epoch_has_the_same_pixels_and_needs_no_file(tmp_path: Path, agent: state_memory.NodeFiles) -> None:
    draw = np.random.default_rng(0)
    for number in range(8):
        for part in ("train", "val"):
            path = tmp_path / part / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)).save(path)

    def epochs(images: ImageConfig, workers: int) -> tuple[Loader, list[Tensor]]:
        config = DataConfig("image_folder", str(tmp_path), image_size=24, augment=True, images=images)
        loader = Loader(build_datasets(config).train, global_batch_size=8, seed=0, share=Share(0, 1), workers=workers)
        return loader, [loader.at(step).inputs for step in range(2)]

    _, expected = epochs(ImageConfig(), 0)
    with closing(epochs(ImageConfig(cache_gb=0.01), 2)[0]):
        for path in tmp_path.glob("train/*/*.jpg"):
            # an empty file cannot be decoded: all pixels of the next epoch come from memory
            path.write_bytes(b"")
        _, found = epochs(ImageConfig(cache_gb=0.01), 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


CLASSES, SIZE = 7, 12


def batch_of(size: int, start: int = 0) -> toolkit.Batch:
    draw = torch.Generator().manual_seed(start)
    data = torch.rand(size, 3, SIZE, SIZE, generator=draw), torch.randint(CLASSES, (size,), generator=draw)
    return toolkit.Batch(data, torch.arange(start, start + size), global_count=size)


def mixing(**given: Any) -> PairMixing:
    return PairMixing(**{"mixup": 0.0, "cutmix": 0.0, "classes": CLASSES, "seed": 3, **given})


def own_share(shares: Tensor, batch: toolkit.Batch) -> Tensor:
    return shares[torch.arange(len(batch)), batch.targets]


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_pairs_are_mixed_as_torchvision_mixes_two_images(kind: str) -> None:
    batch = batch_of(8)
    images, shares = mixing(**{kind: 1.0})(batch)
    for first in range(0, 8, 2):
        pair = slice(first, first + 2)
        labels = batch.targets[pair]
        if labels[0] == labels[1]:
            continue
        lam = own_share(shares, batch)[first].item()
        params: dict[str, Any] = {"labels": labels, "batch_size": 2, "num_classes": CLASSES, "lam": lam}
        theirs = v2.MixUp(num_classes=CLASSES) if kind == "mixup" else v2.CutMix(num_classes=CLASSES)
        if kind == "cutmix":
            # torchvision gets the box that was drawn here: the bounds of the changed pixels
            ys, xs = (images[first] != batch.inputs[first]).any(0).nonzero().T
            params |= {"box": (xs.min().item(), ys.min().item(), xs.max().item() + 1, ys.max().item() + 1)}
            params |= {"lam_adjusted": 1 - len(xs) / SIZE**2}
            assert lam == pytest.approx(params["lam_adjusted"], abs=1e-6)
        assert torch.allclose(theirs.transform(batch.inputs[pair], params), images[pair], atol=1e-6)
        assert torch.allclose(theirs.transform(labels, params), shares[pair], atol=1e-6)


def test_shares_of_mixup_have_the_beta_distribution_asked_for() -> None:
    batch = batch_of(4000)
    batch = toolkit.Batch((batch.inputs[:, :, :1, :1], batch.positions % 2), batch.positions, 4000)
    shares = own_share(mixing(mixup=0.2)(batch)[1], batch)[::2].double()
    expected = torch.distributions.Beta(torch.tensor(0.2), torch.tensor(0.2))
    assert shares.mean().item() == pytest.approx(expected.mean.item(), abs=0.03)
    assert shares.var().item() == pytest.approx(expected.variance.item(), abs=0.01)


def test_both_kinds_are_drawn_as_often() -> None:
    batch = batch_of(2000)
    images, _ = mixing(mixup=1.0, cutmix=1.0)(batch)
    is_same = (images == batch.inputs).all(1).flatten(1).float().mean(1)  # of a mixed image no pixel is its own
    assert (is_same == 0).float().mean().item() == pytest.approx(0.5, abs=0.08)


def test_ranks_and_parts_mix_the_same_as_one_process() -> None:
    whole, mix = batch_of(12, start=24), mixing(mixup=0.4, cutmix=1.0)
    images, shares = mix(whole)
    for cuts in ([0, 6, 12], [0, 4, 8, 12], [0, 2, 12]):
        parts = [mix(whole.part(start, stop)) for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), shares)


def test_a_sample_without_its_neighbour_stays_as_it_is() -> None:
    whole, mix = batch_of(6), mixing(mixup=1.0)
    images, shares = mix(whole.part(1, 4))  # samples 1, 2 and 3: only the last two are a pair
    assert torch.equal(images[0], whole.inputs[1])
    assert shares[0, whole.targets[1]] == 1
    assert torch.equal(images[1:], mix(whole)[0][2:4])
    assert torch.equal(mix(batch_of(5))[0][4], batch_of(5).inputs[4])  # the last one of an odd batch


def test_an_empty_share_stays_empty() -> None:
    images, shares = mixing(mixup=1.0)(batch_of(4).part(2, 2))
    assert images.shape == (0, 3, SIZE, SIZE)
    assert shares.shape == (0, CLASSES)


def test_steps_and_seeds_draw_differently() -> None:
    first, later = batch_of(4), toolkit.Batch(batch_of(4).data, torch.arange(4, 8), 4)
    mix = mixing(mixup=1.0)
    assert not torch.equal(mix(first)[0], mix(later)[0])
    assert not torch.equal(mix(first)[0], mixing(mixup=1.0, seed=4)(first)[0])
    assert torch.equal(mix(first)[0], mix(first)[0])


def test_mixing_nothing_is_refused() -> None:
    with pytest.raises(toolkit.ConfigError, match="one must be above 0"):
        mixing()
