import pytest
import torch

from jobs.models import build_model
from toolkit.base.errors import ConfigError


@pytest.mark.parametrize("name", ["mlp", "lenet"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_own_models_give_logits_for_every_data_set(name: str, shape: tuple[int, int, int]) -> None:
    assert build_model(name, 10, shape)(torch.zeros(2, *shape)).shape == (2, 10)


def test_lenet_refuses_images_that_it_would_halve_to_nothing() -> None:
    with pytest.raises(ConfigError, match="1x3x3 is too small; use mlp"):
        build_model("lenet", 10, (1, 3, 3))


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small"])
def test_torchvision_models_are_fitted_to_grey_images_and_keep_their_names(name: str) -> None:
    grey, colour = (build_model(name, 7, (channels, 64, 64)) for channels in (1, 3))
    assert grey(torch.zeros(2, 1, 64, 64)).shape == colour(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert list(grey.state_dict()) == list(colour.state_dict())


@pytest.mark.parametrize("name", ["alexnet", "vit_b_16"])
def test_torchvision_models_refuse_images_that_are_too_small_with_the_key_to_change(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name: {name} cannot take 1x8x8 images .*set data\.image_size"):
        build_model(name, 10, (1, 8, 8))


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown value 'resnet19'; valid: mlp, lenet, alexnet"):
        build_model("resnet19", 10, (3, 32, 32))
