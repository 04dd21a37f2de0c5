"""`toolkit data fetch`: data sets and weights of torchvision, downloaded on the login node."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from toolkit.base import fsio, terminal
from toolkit.base.errors import DataMissingError, RequestError
from toolkit.base.torch_version import refuse_missing
from toolkit.config.catalog import data_root
from toolkit.files import origin
from toolkit.plugins.formats.images.catalog import FILES, TORCHVISION, fetch_command, files_of
from toolkit.plugins.formats.images.small import TORCHVISION_NAMES

#: Seconds until a download is given up: a server behind a firewall never answers.
FETCH_TIMEOUT_S = 60.0


def fetch(name: str, root: str | None) -> str:
    """Download data set ``name`` below ``root``. Return a sentence that says where it is.

    torchvision downloads into a folder beside the final place and checks the MD5 sums. Only then the folder gets its
    name, so a broken download is never taken for the data set.
    """
    place = data_root(root)
    target, files = place / FILES[name][0], files_of(name, place)
    if all(path.is_file() for path in files):
        return f"{name} is in {target} already"
    if target.exists():
        command = fetch_command(name, place / "published")
        raise RequestError(f"{target} is there but incomplete; to download all of it elsewhere, run {command}")
    refuse_missing(*TORCHVISION)
    fsio.make_dir(place)
    # Beside the final place, so on one file system with it: the rename below makes the whole folder appear at once.
    with tempfile.TemporaryDirectory(prefix=f".fetch-{name}-", dir=place) as scratch:
        import torchvision

        kind = getattr(torchvision.datasets, TORCHVISION_NAMES[name])
        # A data set has several mirrors or one URL. The error of a failed download names them.
        addresses = list(getattr(kind, "mirrors", [])) or [kind.url]
        with _downloading(name, addresses, files):
            kind(Path(scratch), download=True)
        fsio.rename_dir(Path(scratch) / target.name, target)
    return f"{name} is in {target}"


def fetch_weights(name: str, root: str | None) -> str:
    """Download weights of torchvision, see :func:`~toolkit.files.origin.published_path`. Return where they are."""
    from torch.hub import HASH_REGEX, download_url_to_file

    path = origin.published_path(name, root)
    if path.is_file():
        return f"{name} is in {path} already"
    refuse_missing(*TORCHVISION)
    try:
        url = import_module("torchvision.models").get_weight(name).url
    except (ValueError, AttributeError) as error:
        raise RequestError(f"torchvision has no weights {name}: {error}") from None
    fsio.make_dir(path.parent)
    digest = HASH_REGEX.search(url)  # the name of a file of weights holds the beginning of its SHA-256
    with _downloading(name, [url], [path]), fsio.new_path(path) as scratch:
        download_url_to_file(url, str(scratch), digest and digest[1], progress=False)
    return f"{name} is in {path}"


@contextlib.contextmanager
def _downloading(name: str, addresses: Sequence[str], paths: Sequence[Path]) -> Iterator[None]:
    """Give up a server that does not answer. Raises DataMissingError with what to do without internet access here."""
    timeout_s = socket.getdefaulttimeout()
    # torchvision has no timeout of its own; this one covers every connection of the process.
    socket.setdefaulttimeout(FETCH_TIMEOUT_S)
    try:
        with (
            terminal.unguarded(),
            contextlib.redirect_stdout(sys.stderr),
        ):  # torchvision prints its progress; stdout is for the command
            yield
    except (OSError, RuntimeError) as error:
        folder, files = paths[0].parent, "\n".join(f"    {path}" for path in paths)
        raise DataMissingError(
            f"{name} could not be downloaded from {' or '.join(addresses)}: {error}\n"
            f"Run this where there is internet, then copy the folder {folder.name} here; what must be there:\n{files}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_s)
