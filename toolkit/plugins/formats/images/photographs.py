"""Folders of photographs, each read and prepared as in torchvision's reference, and their mixing in pairs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from toolkit.base import this_node
from toolkit.base.errors import ConfigError, DataMissingError
from toolkit.base.torch_version import refuse_missing
from toolkit.config import DataConfig, ImageConfig, choose
from toolkit.config.dataset_catalog import data_root, sample_shape
from toolkit.data.datasets import Datasets, ImagePreprocessor, Standardise, pixels_of, torchvision_transforms
from toolkit.data.fingerprint import digest
from toolkit.data.permutation import hash64
from toolkit.nodes.agent import state_memory
from toolkit.plugins.formats.dataset_catalog import TORCHVISION
from toolkit.ranks.batch import Batch

#: Mean and deviation per channel of ImageNet's training images, pixels scaled to 0..1.
_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(config: DataConfig) -> Datasets:
    """Return the images in ``root/train`` and ``root/val``, which have a folder for each class."""
    root, shape, images = data_root(config.root), sample_shape(config), config.images
    val_size = images.val_size or shape[1]
    resize = images.val_resize or round(val_size * 256 / 224)  # as for ImageNet
    evaluated = ImagePreprocessor((3, val_size, val_size), *_STATISTICS, resize, images.interpolation)
    # Training images that are not changed at random are cut like evaluated ones, to their own size.
    plain = ImagePreprocessor(shape, *_STATISTICS, round(shape[1] * 256 / 224), images.interpolation)
    read, change = (read_pixels, training_transform(images, shape[1])) if config.augment else (plain.pixels, _unchanged)
    standardise, cache_bytes = Standardise(*_STATISTICS), int(images.cache_gb * 2**30)
    try:
        train = Photographs(root / "train", read, change, standardise, erase=images.erase, cache_bytes=cache_bytes)
        test = Photographs(root / "val", evaluated.pixels, _unchanged, standardise)
    except FileNotFoundError as error:
        raise DataMissingError(f"data.root: {root}: {error}") from error
    return Datasets(train, test, len(train.classes), shape, tuple(train.classes), evaluated)


def _unchanged(pixels: Tensor) -> Tensor:
    return pixels


class Photographs:
    """The images of ``root/CLASS/IMAGE``, kept as uint8 until a batch is on its device.

    ``read`` returns the pixels (h, w, c) uint8 of a file, and ``change`` those of an input. With probability ``erase``
    a rectangle of an image is erased, as by torchvision's RandomErasing. What is read is kept in ``cache_bytes`` of
    memory. See :class:`~toolkit.data.workers.UnfinishedSamples`. Raises FileNotFoundError for a class without images.
    """

    def __init__(
        self,
        root: Path,
        read: Callable[[str], Tensor],
        change: Callable[[Tensor], Tensor],
        standardise: Standardise,
        *,
        erase: float = 0.0,
        cache_bytes: int = 0,
    ) -> None:
        refuse_missing(*TORCHVISION)
        folder = import_module("torchvision.datasets").ImageFolder(root)
        self.classes: list[str] = folder.classes
        self._read, self._change, self._standardise = read, change, standardise
        self._eraser = torchvision_transforms().RandomErasing(erase) if erase else None
        self._fingerprint = digest(folder)
        # A worker that uses an object gets a copy of its page, since it counts the references to it. So there is one
        # object for all paths: of a list of them each worker would have a copy of its own in the end.
        paths = [os.fsencode(path) for path, _ in folder.samples]
        self._paths, self._ends = b"".join(paths), np.cumsum([0, *map(len, paths)])
        self._targets = np.array(folder.targets)
        key = f"{root} {self._fingerprint}"
        self._cache = PixelCache(len(paths), cache_bytes, key) if cache_bytes else None

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, *boxes, target = self.unfinished(index)
        # Finish it as a batch of one.
        images, _ = self.finish((pixels[None], *(box[None] for box in boxes), target))
        return images[0], target

    def unfinished(self, index: int) -> tuple[Any, ...]:
        """Return pixels (h, w, c) uint8, the edges (4,) of the erasure if the data set erases, and the class."""
        pixels = self._change(self._opened(index))
        target = int(self._targets[index])
        return (pixels, target) if self._eraser is None else (pixels, self._box(pixels), target)

    def finish(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return inputs (n, c, h, w) float32 and classes (n,) of stacked unfinished samples."""
        pixels, *boxes, targets = data
        images = self._standardise(pixels.permute(0, 3, 1, 2))
        for box in boxes:
            if images.device.type == "cpu":  # most images have no rectangle
                for image, (top, left, bottom, right) in zip(images, box.tolist(), strict=True):
                    image[:, top:bottom, left:right] = 0
            else:  # the edges are on the device, and to ask for them would wait for it
                top, left, bottom, right = box.to(images.device)[:, :, None].unbind(1)
                rows, columns = (torch.arange(edge, device=images.device) for edge in images.shape[-2:])
                in_rows = (rows >= top) & (rows < bottom)
                in_columns = (columns >= left) & (columns < right)
                is_inside = in_rows[:, :, None] & in_columns[:, None]
                images.masked_fill_(is_inside[:, None], 0)
        return images, targets

    def fingerprint(self) -> str:
        """Return the digest of the names and classes."""
        return self._fingerprint

    def _opened(self, index: int) -> Tensor:
        pixels = None if self._cache is None else self._cache.get(index)
        if pixels is None:
            path = os.fsdecode(self._paths[self._ends[index] : self._ends[index + 1]])
            try:
                pixels = self._read(path)
            except Exception as error:  # of a torn file Pillow says what is wrong, but not with which
                raise OSError(getattr(error, "errno", None), f"{path} is not a complete image: {error}") from error
            if self._cache is not None:
                self._cache.put(index, pixels)
        return pixels

    def _box(self, pixels: Tensor) -> Tensor:
        """Return top, left, bottom and right (4,) of the erased rectangle, or zeros for none. Draws as torchvision."""
        assert self._eraser is not None
        if torch.rand(1) >= self._eraser.p:
            return torch.zeros(4, dtype=torch.int64)
        drawn = self._eraser.make_params([pixels.permute(2, 0, 1)])
        top, left = drawn["i"], drawn["j"]
        # Without a value, none of the rectangles that were drawn has fitted.
        if drawn["v"] is None:
            return torch.zeros(4, dtype=torch.int64)
        return torch.tensor([top, left, top + drawn["h"], left + drawn["w"]])


def training_transform(config: ImageConfig, size: int) -> Any:
    """Return the transform of pixels (h, w, 3) uint8 to a training image.

    The image is (``size``, ``size``, 3). The transform is that of torchvision's reference up to the standardising: a
    crop at random, mirroring, ``config.policy``
    (https://github.com/pytorch/vision/blob/main/references/classification/presets.py).
    """
    from PIL import Image

    v2 = torchvision_transforms()
    modes = {mode: v2.InterpolationMode(mode) for mode in ("bilinear", "bicubic")}
    interpolation = choose("data.images.interpolation", config.interpolation, modes)
    crop, mirror = v2.RandomResizedCrop(size, interpolation=interpolation), v2.RandomHorizontalFlip()
    policies: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "auto_augment": lambda: v2.AutoAugment(interpolation=interpolation),
        "rand_augment": lambda: v2.RandAugment(interpolation=interpolation, magnitude=config.magnitude),
        "trivial_augment": lambda: v2.TrivialAugmentWide(interpolation=interpolation),
        "augmix": lambda: v2.AugMix(interpolation=interpolation),
    }
    policy = choose("data.images.policy", config.policy, policies)()

    def transform(pixels: Tensor) -> Tensor:
        pixels = pixels.permute(2, 0, 1)
        at = crop.make_params([pixels])
        bottom, right = at["top"] + at["height"], at["left"] + at["width"]
        cut = pixels[:, at["top"] : bottom, at["left"] : right]
        # The channels stay last: torchvision would first copy the pixels to planes, which takes half of the time.
        cut = cut[None].contiguous(memory_format=torch.channels_last)
        resized = v2.functional.resize(cut, [size, size], interpolation, antialias=True)[0]
        changed: Tensor = mirror(resized).permute(1, 2, 0).contiguous()
        # The policies work on images of Pillow: published figures are of its pixels, and tensors take longer.
        return changed if policy is None else pixels_of(policy(Image.fromarray(changed.numpy())))

    return transform


def read_pixels(path: str) -> Tensor:
    """Return the pixels (h, w, 3) uint8 of an image file, those that Pillow reads.

    JPEG files are decoded to a tensor at once. Raises OSError (Pillow's own included) for a damaged file.
    """
    data = np.fromfile(path, np.uint8)
    # The operator below decode_jpeg(), which torchvision 0.29 deprecates with a warning at each call.
    decode = getattr(torch.ops.image, "decode_jpeg", None)
    # A file without its end mark is torn, and the decoder would fill it with grey: Pillow says what is wrong with it.
    is_whole = data[:3].tobytes() == b"\xff\xd8\xff" and data[-64:].tobytes().rstrip(b"\0").endswith(b"\xff\xd9")
    if decode is not None and is_whole:
        with contextlib.suppress(RuntimeError):
            pixels: Tensor = decode(torch.from_numpy(data), 0, False)  # 0: with the channels of the file
            if len(pixels) in (1, 3):  # four are CMYK, which Pillow converts in another way
                return pixels.expand(3, -1, -1).permute(1, 2, 0)
    return pixels_of(import_module("torchvision.datasets.folder").default_loader(path))


_HEAD = 3
_CHANNELS = 3


class PixelCache:
    """Pixels (h, w, 3) uint8 of images by number, in at most ``most_bytes``, for the workers of all ranks on a node.

    The node's agent holds the file, so restarted ranks find it filled; the kernel frees it when the agent ends. Without
    an agent each rank has its own. The layout: the key (two words), where the next image goes, a row (start, height,
    width) for each image, and the pixels. An image that does not fit is not kept. ``key`` identifies the data set. Make
    the cache before the workers are forked. Raises ConfigError for more memory than there is.
    """

    def __init__(self, count: int, most_bytes: int, key: str) -> None:
        if most_bytes > (limit := this_node.total_memory_bytes()):
            raise ConfigError(
                f"data.images.cache_gb: {most_bytes / 2**30:g} is more than the {limit / 2**30:.1f} GB of memory that "
                "this job may take on a node; use less, and leave room for the ranks"
            )
        words = np.frombuffer(hashlib.sha256(f"{key} {count} {most_bytes}".encode()).digest()[:16], np.int64)
        first = 8 * (_HEAD + 3 * count)
        # The file of the node's agent is tried first, then a file of this rank.
        for path in (os.environ.get(state_memory.PIXEL_FILE), None):
            self._file = os.open(path, os.O_RDWR) if path else os.memfd_create("pixels")
            with self._locked():
                if not os.fstat(self._file).st_size:
                    os.ftruncate(self._file, first + most_bytes)
                    os.pwrite(self._file, np.array([*words, first], np.int64).tobytes(), 0)
            if os.pread(self._file, 16, 0) == words.tobytes():
                break
            os.close(self._file)  # the node's file holds another data set of the job
        self._bytes = np.frombuffer(mmap.mmap(self._file, first + most_bytes), np.uint8)
        numbers = self._bytes[:first].view(np.int64)
        self._head, self._rows = numbers[:_HEAD], numbers[_HEAD:].reshape(count, 3)

    def get(self, index: int) -> Tensor | None:
        """Return the pixels of image ``index``, or None if they are not here. They must not be changed."""
        start, height, width = self._rows[index].tolist()
        if not start:
            return None
        pixels = self._bytes[start : start + height * width * _CHANNELS]
        return torch.from_numpy(pixels.reshape(height, width, _CHANNELS))

    def put(self, index: int, pixels: Tensor) -> None:
        """Keep the pixels of image ``index`` if there is room."""
        height, width, _ = pixels.shape
        if self._head[2] + pixels.numel() > self._bytes.size:
            return
        # Taken under a lock, and filled without it: what a killed worker has taken stays unused.
        with self._locked():
            start = int(self._head[2])
            if self._rows[index, 0] or start + pixels.numel() > self._bytes.size:
                return
            self._head[2] += pixels.numel()
        self._bytes[start : start + pixels.numel()].reshape(pixels.shape)[...] = pixels.numpy()
        with self._locked():  # also a fence: the row must not be seen before the pixels
            self._rows[index] = 0, height, width
            self._rows[index, 0] = start

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock, which the kernel takes from a process that ends."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 16, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 16, 0)


#: Keeps these draws apart from those that other parts of the package make of the same run seed.
_MIX = 0x4D495845


class PairMixing:
    """Mixing of neighbours in the order of the run, on the batch's device.

    Samples 0 and 1 of a global batch give each other a part, samples 2 and 3, and so on. A pair is mixed as a whole
    (mixup, https://arxiv.org/abs/1710.09412) or in a rectangle (CutMix, https://arxiv.org/abs/1905.04899). If both are
    asked for, each is drawn as often. What is drawn follows from the seed and the place in the run, so the number of
    ranks changes nothing, with one exception: two neighbours on different ranks, or in different micro-batches, stay
    as they are. That happens where those have odd numbers of samples::

        >>> mixing = toolkit.PairMixing(mixup=0.2, cutmix=1.0, classes=10, seed=0)
        >>> batch = toolkit.Batch((torch.rand(4, 3, 8, 8), torch.tensor([3, 5, 7, 9])), torch.arange(4), global_count=4)
        >>> images, shares = mixing(batch)
        >>> images.shape, shares.shape, shares.sum(dim=1)
        (torch.Size([4, 3, 8, 8]), torch.Size([4, 10]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, *, mixup: float, cutmix: float, classes: int, seed: int) -> None:
        """Set the mixing up. ``mixup`` and ``cutmix`` are alpha of the Beta distribution of each, or 0 for none."""
        self._alphas = [alpha for alpha in (mixup, cutmix) if alpha]
        if not self._alphas or min(self._alphas) < 0:
            raise ConfigError(f"mixup {mixup} and cutmix {cutmix}: one must be above 0, and none below")
        self._cuts = [False] * bool(mixup) + [True] * bool(cutmix)
        self._classes, self._seed = classes, seed

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mixed images (n, c, h, w), and shares of each class (n, classes), of images and classes (n,)."""
        images, targets = batch.inputs, one_hot(batch.targets, self._classes).to(batch.inputs.dtype)
        if not len(batch):
            return images, targets
        partner, weights = self._drawn(batch, images.shape[-2], images.shape[-1])
        partner, weights = partner.to(images.device), weights.to(images)
        mixed = torch.lerp(images[partner], images, weights[:, None])
        return mixed, torch.lerp(targets[partner], targets, weights.mean((1, 2))[:, None])

    def _drawn(self, batch: Batch, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return each image's partner row (n,) and its own share of pixels (n, h, w)."""
        size = batch.global_count
        start = int(batch.positions[0]) // size * size
        places = batch.positions - start
        # The partner's row, where it is in this batch: else a row is its own partner.
        other = places + 1 - 2 * (places % 2)
        rows = torch.arange(len(places))
        partner = (rows + other - places).clamp(0, len(places) - 1)
        partner = torch.where(places[partner] == other, partner, rows)
        # Drawn for all pairs of the global batch: a share gets the same ones wherever it begins.
        draw = torch.Generator().manual_seed(hash64(_MIX, self._seed, start) >> 1)
        pairs = (size + 1) // 2
        kinds = torch.randint(len(self._alphas), (pairs,), generator=draw)
        alphas = torch.tensor(self._alphas)[kinds].unsqueeze(1).repeat(1, 2)
        shares = torch._sample_dirichlet(alphas, generator=draw)[:, 0]
        x, y = (torch.randint(edge, (pairs,), generator=draw) for edge in (width, height))
        pair = places // 2
        weights = shares[pair].view(-1, 1, 1).repeat(1, height, width)
        # A rectangle with the other's part of the area, around a point at random; what is outside of the image is lost.
        is_cutmix = torch.tensor(self._cuts)[kinds][pair]
        reach = 0.5 * (1 - shares[pair]).sqrt()
        covered = [
            (torch.arange(edge) >= (at[pair] - (reach * edge).int())[:, None])
            & (torch.arange(edge) < (at[pair] + (reach * edge).int())[:, None])
            for at, edge in ((y, height), (x, width))
        ]
        outside = ~(covered[0][:, :, None] & covered[1][:, None, :])
        return partner, torch.where(is_cutmix[:, None, None], outside.float(), weights)
