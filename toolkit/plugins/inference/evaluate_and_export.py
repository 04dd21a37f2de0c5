"""`toolkit evaluate` and `toolkit export`: what they print and write."""

from __future__ import annotations

import csv
import io
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.base import staged
from toolkit.base.errors import RequestError
from toolkit.checkpoint.folder import CheckpointFolder, Keep, pick
from toolkit.cli.arguments import new_path
from toolkit.config import SCRIPT_JOB, JobConfig, load_config, validate
from toolkit.files.rundir import RunDir
from toolkit.run.requeue.follow_up import is_for_one_job
from toolkit.run.submission.executors import choose_executor
from toolkit.run.submission.handle import Run
from toolkit.run.submission.submit import awaited, submit_script

#: The columns of predictions as CSV.
COLUMNS = ("file", "class", "probability")


def choose(run: RunDir, text: str) -> list[Path]:
    """Return the checkpoints that ``text`` (a step, ``newest`` or ``best``) may mean. The first whole one counts."""
    if text != "best":
        return pick(run, None if text == "newest" else text)
    metric = load_config(run.config, site=False).checkpoint.keep_best
    if metric is None:
        raise RequestError(
            f"--checkpoint best: the config of run {run.id} has no checkpoint.keep_best, which says by which metric; "
            "name a step, see `toolkit checkpoint list`"
        )
    folder = CheckpointFolder(run.checkpoints)
    best = Keep(best=metric).best_of(filter(None, map(folder.valid_manifest, folder.list())))
    if best is None:
        raise RequestError(f"--checkpoint best: no checkpoint of run {run.id} was evaluated for {metric}")
    return [folder.path(best)]


def refuse_output(text: str | None, suffixes: Sequence[str]) -> Path | None:
    """Return the path of ``--output``. Raises RequestError where it could not be written, before all computing."""
    if text is None:
        return None
    if Path(text).suffix not in suffixes:
        raise RequestError(f"--output {text}: its name must end in {' or '.join(suffixes)}")
    return new_path(f"--output {text}", text)


def submit_evaluation(run: RunDir, args: Namespace) -> Run:
    """Submit the same evaluation as a separate job, which starts when the run has completed.

    It gets one task on one node, of the kind that the run's config asks for. Raises RequestError.
    """
    if args.images is not None or args.output is not None or args.json:
        raise RequestError("--submit: the figures are written into the run; leave out --images, --output and --json")
    cluster = load_config(run.config, site=False).cluster
    extra = {key: value for key, value in cluster.extra.items() if not is_for_one_job(key)}
    first, *_ = cluster.component_requests  # it runs on one node, as of the first component
    gpus = min(1, first.gpus_per_node)
    one = replace(first, nodes=1, tasks_per_node=1, gpus_per_node=gpus, spare_nodes=0, extra=extra)
    config = JobConfig(name=f"evaluate-{run.name}", job=SCRIPT_JOB, cluster=one)
    validate(config)
    words = ["--checkpoint", args.checkpoint, *(["--weights", args.weights] if args.weights else [])]
    words += [*(["--per-class"] if args.per_class else []), *(["--data", *args.data] if args.data else [])]
    words += [*(["--trust"] if args.trust else []), "--keep"]
    command = [str(staged.origin(sys.executable)), "-m", "toolkit", "evaluate", str(run.path), *words]
    chosen = choose_executor("auto")
    return submit_script(config, command, chosen, awaited(str(run.path), chosen))


def format_text(found: Mapping[str, Any]) -> str:
    """Return the figures of an evaluation as text, next to those that the run itself recorded at this step."""
    own = found["recorded"]
    run = f"{found['name']}/{found['run']}"
    lines = [f"step {found['step']} of {run}, weights: {found['weights']}, on {found['device']}"]
    width = max(map(len, found["metrics"]), default=0)
    for name, value in found["metrics"].items():
        recorded = f"   (the run's own: {own[name]:.6g})" if name in own else ""
        lines.append(f"{name:<{width}}  {value:.6g}{recorded}")
    if found.get("classes"):
        # A line for each class, and their means: each class counts as much as another.
        rows = found["classes"]
        names = ("recall", "precision", "f1")
        column = max(5, min(max(len(str(row["class"])) for row in rows), 24))
        table = [f"{'class':<{column}} {'samples':>8} {'recall':>8} {'precision':>10} {'f1':>8}  taken for"]
        means: dict[str, Any] = {"class": "mean", "samples": sum(row["samples"] for row in rows), "taken_for": None}
        for name in names:
            known = [row[name] for row in rows if row[name] is not None]
            means[name] = sum(known) / len(known) if known else None
        for row in (*rows, means):
            recall, precision, f1 = ("-" if row[name] is None else f"{row[name]:.4f}" for name in names)
            named, mistaken = str(row["class"])[:24], row["taken_for"] or "-"
            figures = f"{row['samples']:>8} {recall:>8} {precision:>10} {f1:>8}"
            table.append(f"{named:<{column}} {figures}  {mistaken}")
        lines += ["", *table]
    return "\n".join(lines)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return ``COLUMNS`` as CSV, with each file's name byte for byte. A file that could not be read has only that."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def exported(found: Mapping[str, Any], target: Path) -> str:
    """Return what was written, a line for each file."""
    lines = [f"{target}: step {found['step']} of {found['run']}, weights: {found['weights']}"]
    lines += [f"  {name}  {(target / name).stat().st_size:,} bytes" for name in [*found["sha256"], "model.json"]]
    for what in ("program", "compiled"):
        trial = found[what]
        if trial is None:
            continue
        sizes = ", ".join(map(str, trial["batch_sizes"]))
        how = f"equal to {trial['largest_difference']:.2g} ({trial['bound']:.2g} is allowed)"
        how = "equal bit for bit" if trial["is_bit_for_bit"] else how
        which = "compiled, " if what == "compiled" else ""
        lines.append(f"  {which}tried on batches of {sizes} real samples: outputs {how}")
    return "\n".join(lines)
