"""Texts as tokens, and windows of tokens. The oracles are plain Python and the package `tokenizers` itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.base.errors import ConfigError, DamagedFileError, DataMissingError, RequestError
from toolkit.config import DataConfig, dataset_catalog
from toolkit.data.datasets import build_datasets
from toolkit.plugins.formats.dataset_catalog import text_files
from toolkit.plugins.formats.tokens import writer
from toolkit.plugins.formats.tokens.folder import Tokens
from toolkit.plugins.formats.tokens.windows import NO_TARGET, TokenWindows, load_tokens
from toolkit.plugins.formats.tokens.writer import Encoder, tokenize

LENGTH = 8
BYTES = Encoder(None, None)
TEXTS = ["one day " * count for count in (1, 5, 2, 9, 1, 3, 7, 4)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in/texts.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS)))
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Tokens:
    """Pack 102 windows and a few bytes. They are documents of up to 96 bytes, each with an end mark."""
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes(1 + (number * 7 + n) % 250 for n in range(number * 13 % 97)))
    writer.pack_bytes(sorted(tmp_path.glob("*.txt")), tmp_path / "packed")
    return Tokens(tmp_path / "packed")


def bytes_of(texts: list[str]) -> list[int]:
    return list(b"".join(text.encode() + b"\0" for text in texts))


def test_tokens_are_the_texts_each_with_its_end_whatever_the_shards(lines: Path, tmp_path: Path) -> None:
    for size in (1, 50, 10**6):
        tokenize([str(lines)], tmp_path / str(size), BYTES, shard_tokens=size)
        tokens = Tokens(tmp_path / str(size))
        assert tokens.read(0, len(tokens)).tolist() == bytes_of(TEXTS)
        assert tokens.index.documents == len(TEXTS)
        ends = np.load(tokens.folder / "documents.npy").tolist()
        assert ends == np.cumsum([len(text) + 1 for text in TEXTS]).tolist()
        assert sorted(path.name for path in tokens.folder.iterdir()) == sorted(
            [".lock", "documents.npy", "index.json", *(shard.name for shard in tokens.index.shards)]
        )
    assert len(Tokens(tmp_path / "1").index.shards) == len(TEXTS)


def test_a_tokenizer_gives_the_ids_that_the_package_gives(lines: Path, tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    theirs.train_from_iterator([f"{text} and {n}" for n, text in enumerate(TEXTS)], trainer)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenize([str(lines)], tmp_path / "out", Encoder(tmp_path / "tokenizer.json", None))
    tokens = Tokens(tmp_path / "out")
    expected = [id for text in TEXTS for id in [*theirs.encode(text).ids, theirs.token_to_id("</s>")]]
    assert tokens.read(0, len(tokens)).tolist() == expected
    assert tokens.index.vocabulary == theirs.get_vocab_size()
    assert tokens.decode(tokens.read(0, 3)) == theirs.decode(expected[:3])
    assert tokens.encode(TEXTS[1]) == theirs.encode(TEXTS[1]).ids
    with pytest.raises(RequestError, match=r"--end: .*<pad> is not in the vocabulary"):
        Encoder(tmp_path / "tokenizer.json", "<pad>")


@pytest.mark.parametrize("unknown", [None, "<unk>"])
@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_a_text_with_a_part_that_is_no_token_is_refused(kind: str, unknown: str | None, tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    vocabulary = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}
    options = {} if unknown is None else {"unk_token": unknown}
    model = tokenizers.models.BPE(vocabulary, [], **options)
    if kind == "WordLevel":
        model = tokenizers.models.WordLevel(vocabulary, **options)
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b a")
    tokenize([str(tmp_path / "a.txt")], tmp_path / "out", Encoder(tmp_path / "tokenizer.json", None))
    tokens = Tokens(tmp_path / "out")
    assert tokens.encode(" b\na ") == [3, 2]
    for text, says in (("a ß b", "'a ß b': the run's tokenizer has no tokens for a part"), (" ", "' ' has no tokens")):
        with pytest.raises(RequestError, match=says):
            tokens.encode(text)


KILLED = """
import os, sys
from pathlib import Path
from toolkit.base import fsio
from toolkit.plugins.formats.tokens import writer

calls, real = 0, {name}
def fails(*args, **options):
    global calls
    calls += 1
    if calls == {number}:
        os._exit(9)
    return real(*args, **options)
{name} = fails
writer.tokenize([sys.argv[1]], Path(sys.argv[2]), writer.Encoder(None, None), shard_tokens=40)
"""


@pytest.mark.parametrize(
    ("name", "number"), [("fsio.append_json_line", 3), ("fsio.write_stream", 4), ("fsio.write_json", 1)]
)
def test_a_killed_command_goes_on_with_the_same_bytes(name: str, number: int, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = KILLED.format(name=name, number=number)
    killed = subprocess.run([sys.executable, "-c", code, str(lines), str(out)], check=False)
    assert killed.returncode == 9
    with pytest.raises(DataMissingError, match=r"has no index\.json"):
        Tokens(out)
    before = (out / "tokens-00000.bin").stat().st_mtime_ns
    index = tokenize([str(lines)], out, BYTES, shard_tokens=40)
    assert index == tokenize([str(lines)], tmp_path / "undisturbed", BYTES, shard_tokens=40)
    assert Tokens(out).read(0, index.tokens).tolist() == bytes_of(TEXTS)
    assert (out / "tokens-00000.bin").stat().st_mtime_ns == before, "what was complete is not written again"


def test_a_folder_of_other_inputs_is_refused_and_the_same_are_done(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    index = tokenize([str(lines)], out, BYTES)
    assert tokenize([str(lines.parent)], out, BYTES) == index
    lines.write_text('{"text": "another"}\n')
    with pytest.raises(RequestError, match="holds tokens of other files"):
        tokenize([str(lines)], out, BYTES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(RequestError, match="has files that this command has not written"):
        tokenize([str(lines)], tmp_path / "mine", BYTES)


def test_an_output_below_an_input_is_no_text_of_it(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lines.parent)
    index = tokenize(["."], Path("tokens"), BYTES)
    assert tokenize(["."], tmp_path / "in" / "tokens", BYTES) == index
    with pytest.raises(RequestError, match="has files that this command has not written"):
        tokenize(["."], tmp_path, BYTES)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"fine \xff", "a.txt is not UTF-8 text: byte 5 is 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', "a.jsonl, the line at byte 14 has no 'text'; see --field"),
        ("a.jsonl", b'{"text": 5}\n', "'text' is not text but a int"),
        ("a.jsonl", b"[1]\n", "the line at byte 0 is not a JSON object"),
        ("a.txt", b"", "there is no document to tokenize"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_its_place(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        tokenize([str(tmp_path / name)], tmp_path / "out", BYTES)
    assert says in str(caught.value)


def test_a_damaged_folder_is_refused_by_its_file(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize([str(lines)], out, BYTES)
    shard = out / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"tokens-00000.bin has \d+ bytes, and by index.json"):
        Tokens(out)
    shard.unlink()
    with pytest.raises(DamagedFileError, match=r"tokens-00000.bin cannot be read"):
        Tokens(out)
    (out / "index.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"index.json"):
        Tokens(out)


def test_held_out_windows_are_evenly_spaced_and_no_other_window_meets_them(packed: Tokens) -> None:
    text = packed.read(0, len(packed))
    held_out = TokenWindows(packed, LENGTH, held_out=True, documents=False)
    every, windows = 20, (len(packed) - 1) // LENGTH
    taken = set()
    for number in range(len(held_out)):
        start = number * every * LENGTH
        taken |= set(range(start, start + LENGTH))
        inputs, targets = held_out[number]
        assert inputs.tolist() == text[start : start + LENGTH].tolist()
        assert targets.tolist() == text[start + 1 : start + LENGTH + 1].tolist()
    others = TokenWindows(packed, LENGTH, held_out=False)
    assert len(others) + len(held_out) == windows
    torch.manual_seed(0)
    seen = {start for _ in range(40) for index in range(len(others)) for start in [others._start(index)]}
    assert not any(taken.intersection(range(start, start + LENGTH)) for start in seen)
    # Everything else is trained on, at offsets of all kinds.
    assert {place for start in seen for place in range(start, start + LENGTH)} | taken == set(range(windows * LENGTH))
    assert {start % LENGTH for start in seen} == set(range(LENGTH))


def test_places_restart_with_each_document_and_no_target_is_of_another(packed: Tokens) -> None:
    text, length = packed.read(0, len(packed)).tolist(), 40
    ends = [0, *np.load(packed.folder / "documents.npy").tolist()]
    windows = TokenWindows(packed, length, held_out=True)
    for number in range(len(windows)):
        start = number * 20 * length
        inputs, targets = windows[number]
        for offset in range(length):
            begin = max(start, max(end for end in ends if end <= start + offset))
            assert inputs[offset].tolist() == [text[start + offset], start + offset - begin]
            is_last = start + offset + 1 in ends
            assert targets[offset].item() == (NO_TARGET if is_last else text[start + offset + 1])


def test_a_window_follows_from_the_random_numbers_alone(packed: Tokens) -> None:
    windows = TokenWindows(packed, LENGTH, held_out=False)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append([windows[index][0] for index in range(20)])
    assert all(torch.equal(one, two) for one, two in zip(draws[0], draws[1], strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(draws[0], draws[2], strict=True))


def test_text_too_short_for_two_windows_is_refused_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234567")
    writer.pack_bytes([tmp_path / "short"], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"data\.root: 8 tokens make 1 windows of 4"):
        TokenWindows(Tokens(tmp_path / "out"), 4, held_out=False)


def make_files(root: Path) -> None:
    for name, content in {"b.txt": b"two", "a/z.md": b"one", ".git/x": b"hidden", ".hidden": b"too"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_the_text_of_a_run_is_packed_once_and_stays_what_it_was(tmp_path: Path) -> None:
    make_files(tmp_path / "books")
    (tmp_path / "run").mkdir()
    config = DataConfig("text", root=str(tmp_path / "books"))
    assert bytes(load_tokens(config, tmp_path / "run").read(0, 8).tolist()) == b"one\0two\0"
    assert (tmp_path / "run/text/tokens-00000.bin").stat().st_mode & 0o777 == 0o600
    (tmp_path / "books/b.txt").write_text("another")
    assert len(load_tokens(config, tmp_path / "run")) == 8


def test_without_a_root_the_text_is_the_standard_library_without_what_was_installed() -> None:
    files = text_files(None)
    assert len(files) > 100
    assert {"argparse.py", "decoder.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts for path in files)


@pytest.mark.parametrize(
    ("name", "says"), [("text", "data.root: there are no text files below"), ("tokens", "toolkit data tokenize")]
)
def test_a_root_without_text_is_refused_before_anything_is_queued(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=says):
        dataset_catalog.check_datasets(DataConfig(name=name, root=str(tmp_path)))


@pytest.mark.parametrize("name", ["text", "tokens"])
def test_text_is_no_data_set_for_a_classifier(name: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"data\.name: {name} has no images .* jobs\.language_model"):
        build_datasets(DataConfig(name=name, root=None if name == "text" else str(tmp_path)))
