"""Reads from what a script's first rank prints how far it is, and finds the checkpoints that the script writes itself.

The script need not know the toolkit: bars of tqdm, Lightning and transformers are understood, timm's lines, and lines
such as ``epoch 3 loss 0.12``. All of it is a guess, which is shown and never decides anything.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from toolkit.base import logs
from toolkit.base.tracebacks import clean, tail_of_file
from toolkit.files import rundir
from toolkit.files.run_files import OutputFigures
from toolkit.files.rundir import RunDir

#: The output is read so often, and the folders so seldom: they may be on a busy file server.
READ_EVERY_S, SEARCH_EVERY_S = 5.0, 60.0
#: Of the output so many last lines are looked at, and so much of each.
MOST_LINES, MOST_CHARS = 400, 500
#: Entries of folders that a search looks at, and how deep below a folder.
MOST_ENTRIES, MOST_DEPTH = 5000, 5

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
#: ``40%|####  | 2/5 [00:01<00:02,  1.9it/s, loss=0.3]``, and of rich ``━━━╸  2/5 0:00:01 • 0:00:02 1.9it/s``.
_BAR = re.compile(
    r"(?:\d{1,3}%\|[^|]{0,200}\||(?<![━╸╺])[━╸╺]+ ?)\s*(?P<step>\d+)/(?P<total>\d+) (?:\[[\d:]+<|\d+:[\d:]+ •)"
)
#: A bar below another one: the cursor goes back up behind it.
_BELOW = re.compile(r"\n([^\n]*?)\x1b\[A")
_RATE = re.compile(
    rf"(?<![\d.])(?P<rate>{_NUMBER})\s?(?:(?:it|steps?|batch(?:es)?)/s|(?P<inverse>s/(?:it|step|batch)))\b"
)
_EPOCH = re.compile(
    r"(?i)\bepochs?['\"]?\s*[:=#\[]?\s*['\"]?(?P<epoch>\d+)(?![\d%])(?:\.\d+)?(?:\s*(?:/|of)\s*(?P<epochs>\d+))?"
)
_STEP = re.compile(
    r"(?i)(?<![\w.])(?:global[_ ])?(?:step|iter|iteration|batch|update)['\"]?\s*[:=#\[]?\s*(?P<step>\d+)(?![\w.])"
    r"(?:\s*(?:/|of)\s*(?P<total>\d+))?"
)
#: timm's ``Train: 3 [ 120/500 ( 24%)]``.
_TIMM = re.compile(r"Train: (?P<epoch>\d+) \[\s*(?P<step>\d+)/(?P<total>\d+) \(")
_LOSS = re.compile(
    r"(?i)(?:(?<![a-z])(?P<whose>[a-z]+)[ _/.-])?"
    rf"\bloss(?:_step)?['\"]?\s*[:=]?\s*['\"]?(?P<loss>{_NUMBER}|nan\b|[-+]?inf\b)"
    rf"|(?<![a-z])(?P<whose_too>[a-z]+)_loss(?:_step)?['\"]?\s*[:=]?\s*['\"]?(?P<loss_too>{_NUMBER}|nan\b|[-+]?inf\b)"
)
#: Bars and losses of something else than training.
_ASIDE = re.compile(
    r"(?i)val|eval|test|dev\b|sanity|predict|load|fetch|download|\bmap|tokeni|filter|extract|generat|sav|shard|writ"
)
#: What names a setting, such as ``max step: 500``: looked for in the last letters before the step.
_SETTING = re.compile(r"(?i)(?:total|max|num|warm-?up|every|per)[\w ]*$")

_FILE = re.compile(r".+\.(?:pt|pth|ckpt|safetensors|distcp|tar)")
_FOLDER = re.compile(r"(?i)(?:checkpoint|ckpt|step|epoch|iter)[-_=]?\w*\d[\w=.-]*|.+\.ckpt")
_NOT_SEARCHED = {"site-packages", "__pycache__", "node_modules", "wandb"}

log = logs.get(__name__)


def parse_progress(text: str, rate: float | None = None) -> OutputFigures:
    """Return what the last lines of an output say. A figure that none of them has is None.

    ``rate``: steps per second, as far as the lines do not say.
    """
    found, is_of_an_epoch = OutputFigures(), False
    for line in reversed(clean(_BELOW.sub(r"\n\1\v\n", text)).split("\n")[-MOST_LINES:]):
        line, is_below = line[:MOST_CHARS].strip(" "), line.endswith("\v")
        bar = _BAR.search(line) if "/" in line else None
        name = line[: bar.start()].strip() if bar is not None else ""
        # Below its own bar transformers draws one without a name for each evaluation.
        if bar is not None and (_ASIDE.search(name) or (is_below and not name)):
            continue
        if found.loss is None and "loss" in line.lower():
            found = found.replace(loss=_loss(line))
        epoch = _EPOCH.search(line) or _TIMM.search(line)
        if bar is not None and epoch is None and "epoch" in name.lower():  # of the epochs, not of their steps
            epoch = re.search(r"(?P<epoch>\d+)/(?P<epochs>\d+) ", line[bar.start() :])
            bar = None
        if found.epoch is None and epoch is not None:
            epochs = epoch.groupdict().get("epochs")
            found = found.replace(epoch=int(epoch["epoch"]), epochs=None if epochs is None else int(epochs))
            # The lines of transformers, ``'epoch': '1.25'``, stand beside a bar of all steps.
            is_of_an_epoch = "'" not in epoch[0]
        step = bar or _TIMM.search(line) or _step(line)
        if found.step is None and step is not None:
            total, own_rate = step["total"], _RATE.search(line)
            if own_rate is not None and (figure := float(own_rate["rate"])) > 0:
                rate = 1 / figure if own_rate["inverse"] else figure
            found = found.replace(step=int(step["step"]), total_steps=None if total is None else int(total))
        if None not in (found.step, found.loss, found.epoch):
            break
    found = found.replace(steps_per_s=rate)
    if not rate or found.step is None or found.total_steps is None or (is_of_an_epoch and found.epochs is None):
        return found
    epochs_left = max(0, (found.epochs or 0) - (found.epoch or 0)) if is_of_an_epoch else 0
    return found.replace(eta_s=(max(0, found.total_steps - found.step) + epochs_left * found.total_steps) / rate)


def _step(line: str) -> re.Match[str] | None:
    return next(
        (step for step in _STEP.finditer(line) if not _SETTING.search(line, max(0, step.start() - 40), step.start())),
        None,
    )


def _loss(line: str) -> float | None:
    for match in _LOSS.finditer(line):
        if not _ASIDE.search(match["whose"] or match["whose_too"] or ""):
            return float(match["loss"] or match["loss_too"])
    return None


def newest_checkpoint(folders: Iterable[Path], since: float, pruned: Sequence[Path] = ()) -> tuple[str, float] | None:
    """Return the newest file or folder with a checkpoint's name that has changed ``since``, and the time of that."""
    left = [MOST_ENTRIES]
    found = max(
        (found for folder in folders for found in _changed(folder, since, pruned, left)),
        key=lambda found: found[1],
        default=None,
    )
    return found and (str(found[0]), found[1])


def _changed(
    folder: Path, since: float, pruned: Sequence[Path], left: list[int], depth: int = 0
) -> Iterator[tuple[Path, float]]:
    left[0] -= 20  # a folder costs the file server more than an entry
    try:
        with os.scandir(folder) as scan:
            entries = list(islice(scan, max(0, left[0])))
    except OSError:  # another one's, or removed meanwhile
        return
    left[0] -= len(entries)
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(".") or entry.name in _NOT_SEARCHED or path in pruned:
            continue
        try:
            if entry.is_file(follow_symlinks=False):
                # In this order: each stat asks the file server.
                if not _FILE.fullmatch(entry.name):
                    continue
                left[0] -= 10
                if left[0] > 0 and (saved := entry.stat(follow_symlinks=False).st_mtime) >= since:
                    # Of a checkpoint of many files its folder is named.
                    yield (path.parent if depth and _FOLDER.fullmatch(path.parent.name) else path), saved
            elif left[0] > 0 and depth < MOST_DEPTH and entry.is_dir(follow_symlinks=False):
                yield from _changed(path, since, pruned, left, depth + 1)
        except OSError:
            continue


def named_folders(argv: Sequence[str]) -> list[Path]:
    """Return the folders that a command line names, also behind ``--out=``."""
    words = [part for word in argv for part in (word, word.partition("=")[2]) if part]
    return [path for path in map(Path, dict.fromkeys(words)) if len(str(path)) < 4096 and path.is_dir()]


class ScriptOutput:
    """What is read from the output of one attempt, by a thread: a file server that hangs must not stop the run."""

    def __init__(self, run: RunDir, attempt: int, argv: Sequence[str]) -> None:
        self._run, self._attempt, self._argv = run, attempt, argv
        self._figures = OutputFigures()
        self._begun = time.time()
        self._first: tuple[float, OutputFigures] | None = None  #: the first step of this epoch, with its time
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def figures(self) -> OutputFigures:
        """Return what was read last."""
        return self._figures

    def close(self) -> None:
        """Read what was printed at last. What takes longer than a second is left."""
        self._is_over.set()
        self._thread.join(1.0)

    def _work(self) -> None:
        search_at, size = 0.0, -1
        while True:
            is_last = self._is_over.wait(READ_EVERY_S)
            now, path = time.monotonic(), self._run.rank_log(self._attempt, 0)
            try:
                before, size = size, path.stat().st_size
                if size != before:
                    self._read(tail_of_file(path))
                if is_last or now >= search_at:
                    search_at = now + SEARCH_EVERY_S
                    self._search()
            except Exception as error:  # of odd output, too: what was read before would be shown as if it held
                self._figures = OutputFigures()
                log.debug("what rank 0 prints cannot be read: %s", error)
            if is_last:
                return

    def _read(self, text: str) -> None:
        figures, now = parse_progress(text), time.monotonic()
        if figures.step is not None and figures.steps_per_s is None:  # a line without a rate: by this clock
            at, first = self._first or (now, figures)
            if (first.epoch, first.total_steps) != (figures.epoch, figures.total_steps) or self._first is None:
                self._first = now, figures
            elif first.step is not None and figures.step > first.step:
                figures = parse_progress(text, (figures.step - first.step) / (now - at))
        known = self._figures
        self._figures = figures.replace(checkpoint=known.checkpoint, checkpoint_saved=known.checkpoint_saved)

    def _search(self) -> None:
        run = self._run
        pruned = (rundir.runs_root().absolute(), run.checkpoints, run.code, run.logs)
        # The folders that the command names are this run's own; where scripts start there may be others' files.
        found = newest_checkpoint([*named_folders(self._argv), run.path], self._begun, pruned)
        found = found or newest_checkpoint([Path.cwd()], self._begun, pruned)
        if found is not None:
            self._figures = self._figures.replace(checkpoint=found[0], checkpoint_saved=found[1])
