"""What a config may ask of the data, checked without reading them."""

from __future__ import annotations

from toolkit.config.schema import ImageConfig, JobConfig
from toolkit.config.strategy_traits import OWN_TIME
from toolkit.errors import ConfigError


def check_data(config: JobConfig) -> None:
    """Refuse keys of the data that do not go with each other. Raises ConfigError."""
    data, name = config.data, config.strategy.name
    if data.share == "auto" and name not in OWN_TIME:
        raise ConfigError(
            f"data.share: auto needs each rank's own time of a step, and shares of any size; with strategy.name {name} "
            f"ranks wait for each other all through a step, or shapes are fixed: use {', '.join(OWN_TIME)}, or even"
        )
    # Refuse keys of photographs that would change nothing.
    images = data.images
    if images != ImageConfig() and data.name != "image_folder":
        raise ConfigError(
            f"data.images: these keys are for data.name image_folder, and it is {data.name}; leave them out"
        )
    for option in ("policy", "erase", "cache_gb"):
        if getattr(images, option) != getattr(ImageConfig(), option) and not data.augment:
            raise ConfigError(f"data.images.{option}: changes nothing while data.augment is false; set that to true")
    if images.policy == "augmix" and images.interpolation != "bilinear":
        raise ConfigError("data.images.interpolation: torchvision's augmix can do bilinear only; use that")
    size = images.val_size or data.image_size or 224
    if images.val_resize is not None and images.val_resize < size:
        raise ConfigError(
            f"data.images.val_resize: {images.val_resize} is less than the edge {size} that is cut out of it; use "
            f"{size} or more"
        )
    if data.split == "global":
        return
    # With a split, refuse keys that would change which samples a rank reads.
    for key, value, why in (
        ("data.repeats", data.repeats > 1, "copies of a sample would be on other ranks; use 1"),
        ("data.share", data.share == "auto", "auto would change how far each rank is in its part; use even"),
        ("data.bad_samples", data.bad_samples == "skip", "skip takes another sample, of any part; use fail"),
        ("retry.allow_fewer_nodes", config.retry.allow_fewer_nodes, "fewer ranks would have other parts; use false"),
    ):
        if value:
            raise ConfigError(f"{key}: does not go with data.split: {data.split}: {why}, or data.split: global")
