"""Data sets of images, and `toolkit data fetch` for torchvision's data sets and weights."""

from toolkit.registry import Plugin

_CATALOG = "toolkit.plugins.images.catalog"
PLUGIN = Plugin(
    "images",
    datasets={name: f"{_CATALOG}:{name.upper()}" for name in ("mnist", "fashion_mnist", "cifar10", "image_folder")},
    commands={"data": "toolkit.plugins.images.command"},
)
