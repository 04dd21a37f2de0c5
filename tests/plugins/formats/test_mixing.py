"""Mixup and CutMix beside torchvision's own. torchvision mixes a batch of two as the pairs here are mixed."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import toolkit
from toolkit.plugins.formats.images.photographs import PairMixing

v2: Any = import_module("torchvision.transforms.v2")  # whose names have no types
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
