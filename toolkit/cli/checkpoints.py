"""`toolkit checkpoint list|verify|diff|export|prune`: a run's checkpoints, from their files alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.base.errors import CheckpointError, ConfigError, RequestError, listing
from toolkit.base.fsio import size_text
from toolkit.checkpoint import manifest
from toolkit.checkpoint.folder import CheckpointFolder, Keep, is_name_of_committed, pick, saved_at, step_of
from toolkit.checkpoint.manifest import Manifest
from toolkit.cli.arguments import new_path
from toolkit.cli.tables import Table
from toolkit.config import load_config
from toolkit.files.rundir import RunDir


def rows(run: RunDir) -> list[dict[str, Any]]:
    """Return a row for each checkpoint, newest first; then for each damaged one, or folder that a save has left."""
    checkpoints = CheckpointFolder(run.checkpoints)
    found = [_row(checkpoints, path) for path in checkpoints.list()]
    for path in _odd(checkpoints):
        problem = "found damaged, and moved aside" if ".bad-" in path.name else "being written, or left over"
        row = {"step": None, "ranks": None, "torch": None, "name": path.name, "saved": saved_at(path)}
        found.append({**row, "problem": problem, "size_bytes": _size(path)})
    return found


def _row(checkpoints: CheckpointFolder, path: Path) -> dict[str, Any]:
    row = {"name": path.name, "step": step_of(path), "saved": saved_at(path), "problem": None}
    try:
        manifest = checkpoints.manifest(path)
    except CheckpointError as error:
        # Without its manifest only the folder itself tells something.
        problem = str(error).removeprefix(f"{path}/")
        return {**row, "size_bytes": _size(path), "ranks": None, "torch": None, "problem": problem}
    size = sum(manifest.files.values())
    if not manifest.meta.get("finite", True):
        row["problem"] = "weights that are not finite (train.on_nan: warn)"
    return {**row, "size_bytes": size, "ranks": manifest.world_size, "torch": manifest.versions.get("torch")}


def _odd(checkpoints: CheckpointFolder) -> list[Path]:
    return sorted(path for path in checkpoints.folder.glob("step-*") if not is_name_of_committed(path))


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir() if file.is_file())


def table(found: list[dict[str, Any]], width: int | None) -> Table:
    """Return the rows as a table for a terminal."""
    rows = [("CHECKPOINT", "SIZE", "RANKS", "TORCH", "SAVED", "NOTE")]
    for row in found:
        saved = datetime.fromtimestamp(row["saved"]).strftime("%Y-%m-%d %H:%M:%S")
        size, ranks = size_text(row["size_bytes"]), str(row["ranks"] or "")
        rows.append((row["name"], size, ranks, row["torch"] or "", saved, row["problem"] or ""))
    return Table(rows, width, ("TORCH", "RANKS"))


def pair(one: RunDir, two: RunDir, steps: Sequence[str]) -> tuple[Path, Path]:
    """Return the two checkpoints to compare.

    Of one run: the two steps, by default the newest two. Of two runs: the same step, by default the newest of each.
    """
    if one.path != two.path:
        first, second = (pick(run, steps[0] if steps else None)[0] for run in (one, two))
        return first, second
    if len(steps) == 2:
        return pick(one, steps[0])[0], pick(one, steps[1])[0]
    there = pick(one, None)
    if steps or len(there) < 2:
        raise RequestError(f"run {one.id}: name two steps of its {len(there)} checkpoints, or another run --with RUN")
    # The list is newest first; the older one comes first here.
    return there[1], there[0]


def verify(run: RunDir, text: str | None) -> Iterator[tuple[Path, str | None]]:
    """Read every byte of the checkpoints, also of those without a manifest, and yield each with its fault, or None."""
    checkpoints = CheckpointFolder(run.checkpoints)
    for path in pick(run, text):
        try:
            checkpoints.verify(path)
        except CheckpointError as error:
            yield path, str(error)
        else:
            yield path, None


def diff(one: Path, two: Path) -> list[str]:
    """Return a line for each thing in which two checkpoints differ, and by how much a tensor does. Verifies both."""
    mine, other = (CheckpointFolder(path.parent).verify(path) for path in (one, two))

    def deviation(name: str) -> str:
        from toolkit.checkpoint import whole  # imports torch

        return whole.deviation(name, *((path, each.tensors[name]) for path, each in ((one, mine), (two, other))))

    lines = _diff_mapping("tensor", _tensors(mine), _tensors(other), lambda name, *_: deviation(name))
    lines += _diff_mapping("value", _values(mine), _values(other))
    return lines + _diff_mapping("meta", mine.meta, other.meta)


def _tensors(manifest: Manifest) -> dict[str, Any]:
    """Return what tells two tensors apart. The number of files that hold them does not."""
    return {
        name: (record.dtype, record.shape, *sorted((part.offsets, part.shape, part.crc32) for part in record.parts))
        for name, record in manifest.tensors.items()
    }


def _values(manifest: Manifest) -> dict[str, Any]:
    return {name: record.value for name, record in manifest.values.items()}


def _diff_mapping(
    what: str,
    one: Mapping[str, Any],
    two: Mapping[str, Any],
    told: Callable[[str, Any, Any], str] = lambda name, mine, other: f"{mine!r} and {other!r}",
) -> list[str]:
    lines = []
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two:
            lines.append(f"{what} {name}: only in the {'first' if name in one else 'second'}")
        elif one[name] != two[name]:
            lines.append(f"{what} {name}: {told(name, one[name], two[name])}")
    return lines


#: The format of an export by the suffix of its name; a name without one is a folder.
FORMATS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", "": "dcp"}


def export(run: RunDir, text: str | None, to: str, form: str | None, *, everything: bool, weights: str | None) -> str:
    """Write the checkpoint of step ``text`` as the file or folder ``to``. Default: the newest good one.

    Returns a line about what was written, and which weights: ``average`` or ``raw``. By default these are the weights
    that the run's figures are of. Another line names the criterion's weights, which are not among them. Raises
    RequestError before anything is read.
    """
    # Refuse a wrong request before torch is imported and files are read.
    if everything and weights is not None:
        raise RequestError(f"--weights {weights}: --all writes the raw weights and the average; leave out one of them")
    suffix = Path(to).suffix
    form = form or FORMATS.get(suffix)
    if form is None:
        raise RequestError(f"--to: {to}: unknown suffix {suffix}; name the format: --as safetensors, torch or dcp")
    target = new_path(f"--to {to}", to)
    from toolkit.checkpoint import whole

    options: dict[str, Any] = {"run": run.id, "everything": everything, "weights": weights}
    # A damaged checkpoint is skipped for the one before it.
    try:
        path, ((count, chosen), names) = whole.from_newest(
            pick(run, text),
            lambda path, manifest: (whole.export(path, manifest, target, form, **options), [*manifest.tensors]),
        )
    except RequestError as error:
        raise RequestError(f"--weights {weights}: {error}") from None
    size = _size(target) if target.is_dir() else target.stat().st_size
    line = f"{target}: {count} tensors of {path.name}, weights: {chosen}, {size_text(size)}"
    left_out = [] if everything else [name for name in names if name.startswith(whole.CRITERION)]
    if left_out:
        line += f"\nnot in it: {listing(left_out)}, which the criterion has learnt; --all writes all tensors"
    return line


def prune(run: RunDir, keep: int) -> list[Path]:
    """Remove old, damaged and unfinished checkpoints, and return their paths.

    The newest ``keep`` stay, and those that the run's config keeps for good. Raises RequestError for a run that may
    still be writing.
    """
    state = run.status().state
    if run.result() is None and state is not None and not state.is_over:
        raise RequestError(f"run {run.id} is {state}: prune it when it has ended")
    config = load_config(run.config, site=False).checkpoint
    # --keep replaces only the number of newest ones; the config's other rules hold.
    try:
        rule = Keep(keep, config.keep_every, config.keep_best)
    except ConfigError as error:  # it names the key of a config
        raise RequestError(str(error).replace("checkpoint.keep: ", "--keep ", 1)) from None
    checkpoints = CheckpointFolder(run.checkpoints, rule)
    odd = [*_odd(checkpoints), *(path for path in checkpoints.list() if not fsio.is_there(path / manifest.NAME))]
    for path in odd:
        fsio.remove_tree(path)
    return [*checkpoints.prune(), *odd]
