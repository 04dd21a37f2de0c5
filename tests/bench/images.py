"""Images per second and core: ours beside plain DataLoaders with torchvision v2.

JPEG files are decoded, augmented at random and standardised. The bench writes photographs of 500 x 375. Every way gives
the same inputs: a random crop to 224 and a random mirroring, or these with the policy and erasing of the recipe for
ResNet-50. First the bench prints how far the inputs of the ways differ. Then all ways take turns, each in a process of
its own, and the CPU time of this process and its workers is counted: the fastest way needs the fewest cores. (Samples
that workers have loaded ahead at the end cost all ways alike.) ``plain`` is torchvision's reference on Pillow, ``plain,
tensors`` the same on tensors of torchvision's own decoder, ``plain, TurboJPEG`` on those of PyTurboJPEG, and ``SPDL`` a
pipeline of threads whose crop, resizing and mirroring are a filter of FFmpeg, without antialiasing. These two run where
they are installed (``--peers FOLDER``: a folder to import them from). ``ours, standardised elsewhere`` leaves the
standardising to a device, as a training on a GPU does. ``ours, cached`` has the decoded images in memory as well, as
from the second epoch on with ``data.images.cache_gb``.

Last comes the memory that each worker needs to go through the names of many files, since Python counts references to
them.

    python -m tests.bench.images [--images 300] [--rounds 5] [--workers 0 2] [--names 100000] [--peers FOLDER]
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from tests.bench import record
from toolkit.config import DataConfig, ImageConfig
from toolkit.data.datasets import Standardise, build_datasets
from toolkit.data.loader import Loader
from toolkit.data.randomness import seed_sample
from toolkit.nodes.agent import state_memory
from toolkit.plugins.formats.images.photographs import Photographs
from toolkit.ranks.batch import Share

HEIGHT, WIDTH, SIZE, BATCH, CLASSES = 375, 500, 224, 10, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CACHED = ImageConfig(cache_gb=1.0)
RECIPE = ImageConfig(policy="trivial_augment", erase=0.1)

#: Yields the inputs of an epoch, batch by batch; of a folder, with so many workers.
Epoch = Callable[[Path, int], Iterator[Tensor]]


def write_photographs(root: Path, count: int) -> None:
    """Write JPEG files of about 100 kB, near the mean of ImageNet's.

    The pixels are noise whose strength falls with its frequency.
    """
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        pixels = torch.zeros(3, HEIGHT, WIDTH)
        for cell in (1, 2, 4, 8, 16, 32, 64):
            noise = torch.randn(1, 3, HEIGHT // cell + 2, WIDTH // cell + 2, generator=draw)
            gray = noise.mean(1, keepdim=True)  # channels are mostly alike
            pixels += torch.nn.functional.interpolate(1.5 * gray + 0.3 * noise, (HEIGHT, WIDTH), mode="bilinear")[0] * (
                cell**0.4
            )
        levels = (pixels / pixels.std() * 50 + 120).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        path = root / "train" / f"class-{number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(levels).save(path, quality=95)
    (root / "val").symlink_to("train")


def by_torchvision() -> Callable[[str], Tensor]:
    io = import_module("torchvision.io")
    return lambda path: io.decode_image(io.read_file(path), io.ImageReadMode.RGB)


def by_turbojpeg() -> Callable[[str], Tensor]:
    turbojpeg = import_module("turbojpeg")
    decode = turbojpeg.TurboJPEG().decode
    rgb = turbojpeg.TJPF_RGB
    return lambda path: torch.from_numpy(decode(Path(path).read_bytes(), pixel_format=rgb)).permute(2, 0, 1)


def plain_set(root: Path, images: ImageConfig, decoder: Callable[[], Callable[[str], Tensor]] | None = None) -> Any:
    """Return torchvision's ImageFolder with the transforms of its reference. Without a ``decoder`` Pillow decodes."""
    v2, datasets = import_module("torchvision.transforms.v2"), import_module("torchvision.datasets")
    steps = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()]
    bilinear = v2.InterpolationMode.BILINEAR  # as the reference has it; nearest is the policy's own default
    steps += [v2.TrivialAugmentWide(interpolation=bilinear)] if images.policy == "trivial_augment" else []
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    steps += [v2.RandomErasing(images.erase)] if images.erase else []
    more = {} if decoder is None else {"loader": decoder()}
    return datasets.ImageFolder(root / "train", v2.Compose(steps), **more)


def our_set(root: Path, images: ImageConfig) -> Any:
    config = DataConfig("image_folder", str(root), image_size=SIZE, augment=True, images=images)
    return build_datasets(config).train


def plain(images: ImageConfig, decoder: Callable[[], Callable[[str], Tensor]] | None = None) -> Epoch:
    def epoch(root: Path, workers: int) -> Iterator[Tensor]:
        data = plain_set(root, images, decoder)
        endless = RandomSampler(data, replacement=True, num_samples=10**9)  # as ours is
        batches = DataLoader(data, BATCH, sampler=endless, num_workers=workers)
        for inputs, _ in itertools.islice(batches, len(data) // BATCH):
            yield inputs

    return epoch


def ours(images: ImageConfig, device: str = "cpu") -> Epoch:
    def epoch(root: Path, workers: int) -> Iterator[Tensor]:
        data = our_set(root, images)
        loader = Loader(data, global_batch_size=BATCH, seed=0, share=Share(0, 1), workers=workers, device=device)
        for step in range(len(data) // BATCH):
            yield loader.at(step).inputs
        loader.close()

    return epoch


def spdl(root: Path, workers: int) -> Iterator[Tensor]:
    io, pipeline = import_module("spdl.io"), import_module("spdl.pipeline")
    draw = import_module("torchvision.transforms").RandomResizedCrop.get_params
    whole = torch.empty(3, HEIGHT, WIDTH, device="meta")
    mean, std = (255 * torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))

    def decode(path: Path) -> Tensor:
        top, left, height, width = draw(whole, (0.08, 1.0), (3 / 4, 4 / 3))
        mirrored = ",hflip" if torch.rand(()) < 0.5 else ""
        changes = f"crop={width}:{height}:{left}:{top},scale={SIZE}:{SIZE}:flags=bilinear{mirrored},format=rgb24"
        pixels: Tensor = io.to_torch(io.load_image(str(path), filter_desc=changes))
        return pixels

    def batch(images: list[Tensor]) -> Tensor:
        return torch.stack(images).permute(0, 3, 1, 2).float().sub_(mean).div_(std).contiguous()

    files = sorted((root / "train").glob("*/*.jpg"))
    threads = max(workers, 1)
    built = pipeline.PipelineBuilder().add_source(files).pipe(decode, concurrency=threads).aggregate(BATCH)
    with (reading := built.pipe(batch).add_sink(2).build(num_threads=threads)).auto_stop():
        yield from reading


#: The first of each is the measure of the others. A tensor on ``meta`` has no memory, and work on it takes no time.
WAYS: dict[str, dict[str, Epoch]] = {
    "crop": {
        "plain": plain(ImageConfig()),
        "plain, tensors": plain(ImageConfig(), by_torchvision),
        "plain, TurboJPEG": plain(ImageConfig(), by_turbojpeg),
        "SPDL": spdl,
        "ours": ours(ImageConfig()),
        "ours, standardised elsewhere": ours(ImageConfig(), "meta"),
        "ours, cached": ours(CACHED, "meta"),
    },
    "recipe": {
        "plain": plain(RECIPE),
        "plain, tensors": plain(RECIPE, by_torchvision),
        "plain, TurboJPEG": plain(RECIPE, by_turbojpeg),
        "ours": ours(RECIPE),
        "ours, standardised elsewhere": ours(RECIPE, "meta"),
    },
}


#: The module that a way needs.
PEERS = {"plain, TurboJPEG": "turbojpeg", "SPDL": "spdl"}


def difference(root: Path) -> float:
    """Return the largest difference between our inputs and the plain ones, in levels of 255."""
    largest = 0.0
    one, other = our_set(root, ImageConfig()), plain_set(root, ImageConfig())
    for index in range(min(len(one), 20)):
        images = []
        for data in (one, other):
            seed_sample(0, index)
            images.append(data[index][0])
        levels = (images[0] - images[1]) * torch.tensor(STD).view(3, 1, 1) * 255
        largest = max(largest, float(levels.abs().max()))
    return largest


def cpu_s(epoch: Epoch, root: Path, workers: int) -> float:
    """Return the CPU seconds of an epoch, workers included, in a process of its own."""
    context: Any = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_count, args=(epoch, root, workers, sending))
    process.start()
    sending.close()
    seconds: float = receiving.recv()
    process.join()
    return seconds


def _count(epoch: Epoch, root: Path, workers: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the deprecated decoder
    before = _used()
    for inputs in epoch(root, workers):
        assert inputs.shape == (BATCH, 3, SIZE, SIZE)
        assert inputs.dtype == torch.float32
    pipe.send(_used() - before)


def _used() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare(root: Path, count: int, rounds: int, workers: int) -> Iterator[dict[str, Any]]:
    """Print the lines of one number of workers, and yield its rows."""
    for kind, every in WAYS.items():
        ways = {name: epoch for name, epoch in every.items() if find_spec(PEERS.get(name, "torch"))}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, epoch in ways.items():
                found[name].append(cpu_s(epoch, root, workers))
        rates = {name: [count / each for each in seconds] for name, seconds in found.items()}
        for name, values in rates.items():
            ratios = np.array(values) / np.array(rates["plain"])
            spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
            rate = statistics.median(values)
            print(f"{kind:7} {workers:>7}  {name:29} {rate:8.0f} {np.median(ratios):7.2f}  {spread}", flush=True)
            title, to = f"{kind}, {workers} workers, {name}", rates["plain"]
            yield record.row(title, values, "images/CPU s", to=to, peer="plain", better="more")


def copied_mib(data: Any) -> float:
    """Return the MiB that a worker copies while it reads all names of ``data``."""
    context: Any = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_go_through, args=(data, sending))
    gc.collect()
    gc.freeze()  # a collection in the child would touch all objects, whoever made them
    process.start()
    gc.unfreeze()
    sending.close()
    mib: float = receiving.recv()
    process.join()
    return mib


def _go_through(data: Any, pipe: Connection) -> None:
    read = getattr(data, "unfinished", data.__getitem__)
    read(0)
    before = _private_mib()
    for index in range(len(data)):
        read(index)
    pipe.send(_private_mib() - before)


def _private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def compare_names(root: Path, count: int) -> Iterator[dict[str, Any]]:
    """Print what the names of ``count`` files cost each worker, and yield the rows."""
    files = [*root.glob("train/*/*")]  # a file may have 65,000 links
    folder = root / "names" / "class-0"
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:09d}.jpg").hardlink_to(files[number % len(files)])
    pixels = torch.zeros(1, 1, 3, dtype=torch.uint8)
    plain_data = import_module("torchvision.datasets").ImageFolder(root / "names", loader=lambda _: pixels)
    our_data = Photographs(root / "names", lambda _: pixels, lambda pixels: pixels, Standardise(MEAN, STD))
    for name, data in {"plain": plain_data, "ours": our_data}.items():
        title, mib = f"names of {count:,} files, {name}", copied_mib(data)
        print(f"{title}: {mib:.1f} MiB copied into each worker in an epoch")
        yield record.row(title, [mib], "MiB")


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--names", type=int, default=100_000)
    parser.add_argument("--peers", type=Path)
    record.add_option(parser)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    torch.set_num_threads(1)
    count = max(args.images // BATCH, 1) * BATCH
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root, count)
        size = statistics.mean(path.stat().st_size for path in root.glob("train/*/*")) / 1000
        print(f"{count} files of {WIDTH} x {HEIGHT}, {size:.0f} kB each")
        largest = difference(root)
        print(f"largest difference of an input, ours from plain: {largest:.2f} levels of 255")
        assert largest < 1.01, "they do not give the same images"
        node = state_memory.NodeFiles()  # as an agent holds them
        os.environ[state_memory.PIXEL_FILE] = node.pixel_file
        for _ in ours(CACHED)(root, 0):
            pass
        print(f"{'changes':7} {'workers':>7}  {'':29} {'images/s':>8} {'x plain':>7}  in each round")
        rows = [row for workers in args.workers for row in compare(root, count, args.rounds, workers)]
        rows += compare_names(root, args.names)
    rows.append(record.row("largest difference of an input from plain", [largest], "levels of 255", better="same"))
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
