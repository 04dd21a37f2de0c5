"""The data sets ``text`` and ``tokens``, as far as they are known without torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import DataMissingError, RequestError
from toolkit.base.staged import staged
from toolkit.config import DataConfig
from toolkit.config.catalog import Entry, data_root

#: The file of a folder of token shards that is written last.
TOKEN_INDEX = "index.json"
#: Folders of the standard library that hold others' code, or tests of it.
_NOT_OURS = {"site-packages", "dist-packages", "test", "tests"}


def text_files(root: str | None) -> list[Path]:
    """Return the files of ``text`` in order: all below ``root`` but hidden ones. Null: the standard library's."""
    import sysconfig  # takes longer than all the rest, and other data sets do not need it

    folder = staged(fsio.expand(root or sysconfig.get_path("stdlib")).absolute())
    files = list(fsio.files_below(folder, "*" if root else "*.py"))
    if not root:
        files = [path for path in files if _NOT_OURS.isdisjoint(path.relative_to(folder).parts)]
    if not files:
        raise DataMissingError(f"data.root: there are no text files below {folder}; give it a folder that holds some")
    return files


def _check_tokens(config: DataConfig) -> None:
    root = data_root(config.root)
    if not (root / TOKEN_INDEX).is_file():
        raise DataMissingError(
            f"data.root: {root} has no {TOKEN_INDEX}: make token shards of your texts with\n"
            f"    toolkit data tokenize TEXTS --tokenizer tokenizer.json --out {shlex.quote(str(root))}\n"
            "which goes on where it was killed"
        )


def no_fetch(name: str, root: str | None) -> str:
    """Refuse to fetch token shards, and say how they are made."""
    raise RequestError(f"{name} are made from your own texts: see `toolkit data tokenize`")


TEXT = Entry((1, 1, 1), classes=256, check=lambda config: text_files(config.root))  # bytes; see text_files
TOKENS = Entry((1, 1, 1), classes=None, check=_check_tokens, fetch="toolkit.plugins.formats.tokens.catalog:no_fetch")
