from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from toolkit.config import DataConfig, catalog
from toolkit.data import text
from toolkit.data.datasets import build_datasets
from toolkit.errors import ConfigError, DataMissingError

LENGTH = 4


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "packed"
    path.write_bytes(bytes(n % 251 for n in range(102 * LENGTH + 3)))
    return path


def all_of(path: Path, *, held_out: bool) -> list[tuple[list[int], list[int]]]:
    windows = text.TextWindows(path, LENGTH, held_out=held_out)
    inputs, targets = windows.batch(np.arange(len(windows)))
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def test_windows_are_the_text_in_order_each_once_in_training_or_held_out(packed: Path) -> None:
    raw = list(packed.read_bytes())
    starts = range(0, 102 * LENGTH, LENGTH)
    expected = [(raw[start : start + LENGTH], raw[start + 1 : start + LENGTH + 1]) for start in starts]
    held_out, others = all_of(packed, held_out=True), all_of(packed, held_out=False)
    assert held_out == expected[::20]
    assert others == [window for number, window in enumerate(expected) if number % 20]


def test_of_a_long_text_no_more_is_held_out_than_an_evaluation_needs(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(bytes(20_000 * LENGTH + 1))
    held_out, others = (len(text.TextWindows(path, LENGTH, held_out=is_it)) for is_it in (True, False))
    assert 256 <= held_out <= 260
    assert held_out + others == 20_000


def test_text_too_short_for_two_windows_is_refused_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(ConfigError, match=r"data\.root: 8 bytes of text make 1 windows of 4"):
        text.TextWindows(tmp_path / "short", LENGTH, held_out=False)


def make_files(root: Path) -> None:
    for name, content in {"b.txt": b"two", "a/z.md": b"one", ".git/x": b"hidden", ".hidden": b"too"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_the_text_of_a_run_is_packed_once_and_stays_what_it_was(tmp_path: Path) -> None:
    make_files(tmp_path / "books")
    (tmp_path / "run").mkdir()
    path = text.pack_text(str(tmp_path / "books"), tmp_path / "run")
    assert path.read_bytes() == b"one\0two\0"
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "books/b.txt").write_text("another")
    assert text.pack_text(str(tmp_path / "books"), tmp_path / "run").read_bytes() == b"one\0two\0"


def test_without_a_root_the_text_is_the_standard_library_without_what_was_installed() -> None:
    files = catalog.text_files(None)
    assert len(files) > 100
    assert {"argparse.py", "decoder.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts for path in files)


def test_a_root_without_text_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=f"data.root: there are no text files below {tmp_path}"):
        catalog.check_datasets(DataConfig(name="text", root=str(tmp_path)))


def test_text_is_no_data_set_for_a_classifier() -> None:
    with pytest.raises(ConfigError, match=r"data\.name: text has no images .* jobs\.language_model"):
        build_datasets(DataConfig(name="text"))
