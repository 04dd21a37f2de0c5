"""A trained run's model on one device, without ranks: for `toolkit evaluate`, `toolkit generate` and `toolkit export`.

The job (:class:`toolkit.Job`), imported from the run's own copy of the sources, says how to make the model and how to
judge it. A language model maps tokens (n, length) to logits (n, length, vocabulary) of the token that follows each, and
no token changes the logits before it. So texts of several lengths are one batch, filled up at their ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError, JobFailedError, RequestError
from toolkit.base.process_limits import limits
from toolkit.checkpoint import whole
from toolkit.checkpoint.manifest import Manifest
from toolkit.config import SCRIPT_JOB, JobConfig, is_loop, load_config
from toolkit.data.datasets import ImagePreprocessor
from toolkit.data.loader import eval_batches
from toolkit.devices import accelerator
from toolkit.files.rundir import RunDir, refuse_untrusted_code
from toolkit.ranks.batch import Batch, Share
from toolkit.run.rank.user_job import job_class, load, params_of
from toolkit.strategies.layouts import autocast
from toolkit.strategies.models import modules_with_extra_state
from toolkit.strategies.objective import Measure, Sums, capture_model_inputs, measured
from toolkit.strategies.protocol import Strategy, SynchronousStrategy
from toolkit.train.initial import fill
from toolkit.train.job import Job, evaluation

#: Images that `--images` holds in memory at once.
BATCH = 64
IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}

log = logs.get(__name__)


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model, in evaluation mode on ``device``; ``weights`` is ``average`` or ``raw``."""

    run: RunDir
    config: JobConfig
    checkpoint: Path
    manifest: Manifest
    weights: str
    job: Job
    model: nn.Module
    device: torch.device

    def recorded(self) -> dict[str, float]:
        """Return the figures of the run's own evaluation of these weights at this step. Empty: there was none."""
        meta = self.manifest.meta
        is_of_this = meta.get("evaluated") == self.manifest.step and self.weights == whole.evaluated_weights(
            self.manifest
        )
        metrics = meta.get("metrics", {}) if is_of_this else {}
        return {name: value for name, value in metrics.items() if name.startswith("eval/")}

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.id,
            "name": self.run.name,
            "step": self.manifest.step,
            "checkpoint": str(self.checkpoint),
            "weights": self.weights,
            "device": self.device.type,
        }


@contextmanager
def trained(
    run: RunDir, paths: Sequence[Path], *, data: Sequence[str] = (), weights: str | None = None
) -> Iterator[Trained]:
    """Load the first undamaged checkpoint among ``paths``, on the GPU if there is one.

    ``data`` are ``key=value`` of the config's data section. ``weights`` is ``average`` or ``raw``, by default the
    average where the checkpoint has one. Raises RequestError for what cannot be asked of this run, and CheckpointError.
    """
    config = load_config(run.config, [f"data.{text.removeprefix('data.')}" for text in data], site=False)
    device = torch.device(accelerator.kind().type)
    # A job that prepares other data than the run's must not write them into the run's folder.
    with tempfile.TemporaryDirectory() as scratch:
        job = _job_of(run, config, Path(scratch) if data else run.path, device)
        model = job.model()
        if not isinstance(model, nn.Module):  # the networks of a job with a train_step
            model = nn.ModuleDict(model)
        path, (manifest, chosen) = whole.from_newest(paths, lambda path, stored: _load(model, path, stored, weights))
        log.info("%s: %s", run.id, path.name)
        yield Trained(run, config, path, manifest, chosen, job, model.to(device).eval(), device)


def _job_of(run: RunDir, config: JobConfig, folder: Path, device: torch.device) -> Job:
    """Make the job from the run's copy of the sources. It keeps its data in ``folder``."""
    if config.job == SCRIPT_JOB:
        raise RequestError(f"run {run.id} is a script of your own: only it knows its model")
    # Sources are about to run as this user: refuse them where others can change them. The config can name any file.
    refuse_untrusted_code(run)
    sources = run.code if run.code.is_dir() else Path.cwd()
    if is_loop(config.job, sources):
        raise RequestError(
            f"run {run.id} is that of a script ({config.job}) with a loop of its own, which does not say how its model "
            f"is made and judged; `toolkit checkpoint export {run.id} --to PATH` writes its weights"
        )
    module = load(config.job, sources)
    kind = job_class(module)
    if kind is None:
        raise RequestError(
            f"job: {config.job} of run {run.id} ({module.__file__}) has no class derived from toolkit.Job, which says "
            "how to make its model and how to judge it without training; see jobs/classify.py"
        )
    job: Job = kind(config, params_of(kind, config), folder, device)
    return job


def _load(model: nn.Module, folder: Path, manifest: Manifest, weights: str | None) -> tuple[Manifest, str]:
    """Fill ``model`` with all of its tensors, each byte verified. Return the manifest and which weights they are."""
    try:
        chosen, records = whole.model_tensors(manifest.tensors, weights)
    except RequestError as error:
        raise RequestError(f"--weights {weights}: {folder}: {error}") from None
    # Unlike at a fine-tuning's start, every name and shape must match: it is the run's own model.
    match = fill(model, {name: whole.read(folder, name, record) for name, record in records.items()})
    if match.missing or match.extra or match.misshapen:
        raise CheckpointError(f"{folder} holds another model than the run's config makes{match.misfits()}")
    for name, module in modules_with_extra_state(model).items():
        stored = manifest.values.get(f"model/{name}")
        module.set_extra_state(whole.read(folder, name, records[name]) if stored is None else stored.value)
    return manifest, chosen


class OneProcess(SynchronousStrategy):
    """One process with the whole model: the part of a strategy that an evaluation uses."""

    share = Share(0, 1)
    evaluates_together = False

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    @torch.no_grad()
    def evaluate(self, batch: Batch | None, measure: Measure) -> Sums:
        if batch is None or not len(batch):
            return Sums({}, 0)
        here = batch.to(self._trained.device)
        with training_precision(self._trained):
            return measured(measure, self._trained.model, here)

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}

    def by_rank(self, values: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        return {name: torch.tensor([value], dtype=torch.float64) for name, value in self.sum(values).items()}

    def gather(self, value: Any) -> list[Any]:
        return [value]


def training_precision(trained: Trained) -> AbstractContextManager[object]:
    """Compute in the precision of the run's training."""
    return autocast(trained.device, trained.config.train.precision)


def evaluate(trained: Trained) -> dict[str, float]:
    """Return the figures of the job's own evaluation over its whole eval set, as ``eval/<name>``."""
    eval_set = trained.job.eval_set()
    if eval_set is None:
        raise RequestError(f"job: {trained.config.job} of run {trained.run.id} has no eval_set() to evaluate on")
    means = evaluation(trained.job, eval_set, ranks=1)(cast(Strategy, OneProcess(trained)), lambda: False)
    assert means is not None, "only a stop cuts an evaluation short, and there is none here"
    return {f"eval/{name}": value for name, value in means.items()}


def by_class(trained: Trained) -> list[dict[str, Any]]:
    """Return the figures of each class over the eval set, one dictionary a class.

    They are its samples, recall, precision, F1, and the class that it is most often taken for. A figure whose divisor
    is 0 is None. Raises RequestError where the job is no classifier of pairs (input, class).
    """
    job, classes = trained.job, trained.job.classes
    eval_set = job.eval_set()
    if not classes or eval_set is None:
        raise RequestError(
            f"--per-class: {trained.config.job} says no `classes`, or has no eval_set() to count them in"
        )
    count = len(classes)
    taken = torch.zeros(count * count, dtype=torch.int64)  # by the true class, then by the predicted one
    for batch in eval_batches(eval_set, Share(0, 1), job.eval_batch_size, collate=job.collate):
        assert batch is not None
        here = batch.to(trained.device)
        args, kwargs = capture_model_inputs(job.evaluate, here) or ((), {})
        with torch.no_grad(), training_precision(trained):
            outputs = trained.model(*args, **kwargs)
        if outputs.shape[1] > count:
            raise RequestError(
                f"--per-class: `classes` of {trained.config.job} names {count}, and the model has {outputs.shape[1]} "
                "outputs; name a class for each output"
            )
        taken += torch.bincount(batch.targets * count + outputs.argmax(dim=1).cpu(), minlength=count * count)
    table = taken.view(count, count)
    rows = []
    for number, name in enumerate(classes):
        right = int(table[number, number])
        samples, chosen = int(table[number].sum()), int(table[:, number].sum())
        others = table[number].clone()
        others[number] = 0
        rows.append(
            {
                "class": name,
                "samples": samples,
                "recall": right / samples if samples else None,
                "precision": right / chosen if chosen else None,
                "f1": 2 * right / (samples + chosen) if samples + chosen else None,
                "taken_for": classes[int(others.argmax())] if others.any() else None,
            }
        )
    return rows


def predictions(trained: Trained, folder: Path, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield ``file``, ``class``, ``probability`` and ``error`` for each image of ``files`` below ``folder``.

    A file that cannot be read has an ``error`` and no class. Raises RequestError where the job classifies no images.
    """
    pictures, classes = trained.job.pictures, trained.job.classes
    if pictures is None or not classes:
        raise RequestError(
            f"--images: {trained.config.job} on data.name {trained.config.data.name} does not say how image files "
            "become its inputs: the attributes `classes` and `pictures` of its class do"
        )
    # Files that cannot be read are left out of the batch, and yielded with their error.
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        read = {path: _read(pictures, path) for path in some}
        images = {path: image for path, image in read.items() if isinstance(image, Tensor)}
        answers: dict[Path, tuple[str, float]] = {}
        if images:
            with torch.no_grad(), training_precision(trained):
                logits = trained.model(torch.stack([*images.values()]).to(trained.device))
            probabilities, numbers = logits.float().softmax(1).max(1)
            names = [classes[number] for number in numbers.tolist()]
            answers = dict(zip(images, zip(names, probabilities.tolist(), strict=True), strict=True))
        for path in some:
            name, probability = answers.get(path, (None, None))
            error = None if path in answers else read[path]
            yield {"file": str(path.relative_to(folder)), "class": name, "probability": probability, "error": error}


def _read(pictures: ImagePreprocessor, path: Path) -> Tensor | str:
    """Return the input, or what is wrong with the file."""
    try:
        return pictures.read(path)
    except Exception as error:  # Pillow raises many kinds, and one damaged file must not stop the others
        log.warning("%s cannot be read: %s", path, error)
        return f"{type(error).__name__}: {error}"


def image_files(folder: Path) -> list[Path]:
    """Return every image below ``folder`` except hidden ones, by name. Raises RequestError where there is none."""
    if not folder.is_dir():
        raise RequestError(f"--images {folder}: no such folder")
    found = [path for path in fsio.files_below(folder) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise RequestError(f"--images {folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


#: Tokens that are added to a text where the caller does not say how many, if the model can see that many.
MOST = 64


@runtime_checkable
class Vocabulary(Protocol):
    """What a language model's job knows of its tokens, such as what `toolkit.load_tokens` returns."""

    index: Any  #: has ``vocabulary``: tokens are below it; and ``end``: the one that ends a document

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen by its logits."""

    temperature: float = 1.0  #: 0: the most likely token
    top_k: int | None = None  #: only these most likely ones
    seed: int = 0

    def choose(self, logits: Tensor, draw: torch.Generator) -> int:
        """Return the number of a token, by ``logits`` (vocabulary,) on the CPU."""
        if not logits.isfinite().all():
            raise JobFailedError("the model's outputs are not finite: its training has diverged; take an older step")
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return int(torch.multinomial((logits / self.temperature).softmax(0), 1, generator=draw))


class _Text:
    """A text that is being continued."""

    def __init__(self, text: str, prompt: list[int], most: int, end: int, draw: torch.Generator) -> None:
        self.text, self.ids, self.draw = text, [*prompt], draw
        self._begin, self._full, self._end = len(prompt), len(prompt) + most, end

    @property
    def has_ended(self) -> bool:
        return self.ids[self._begin :][-1:] == [self._end]

    @property
    def is_over(self) -> bool:
        return self.has_ended or len(self.ids) == self._full

    @property
    def added(self) -> list[int]:
        """Return the new tokens, without the one that ends a document."""
        return self.ids[self._begin : len(self.ids) - self.has_ended]


def continuations(trained: Trained, texts: Sequence[str], most: int | None, sampling: Sampling) -> list[dict[str, Any]]:
    """Return what follows each text. Each has ``prompt``, ``text``, the number of ``tokens``, and ``ended``.

    ``ended`` is true where the model has ended the document. A text gets ``most`` tokens, by default 64 or what the
    model can see, and fewer where it has ended. What is drawn for a text depends on its place among ``texts`` and not
    on the others. Raises RequestError where the job is no language model, and for a text that has no tokens or too
    many.
    """
    job = trained.job
    tokens, context = job.tokens, job.context
    if not isinstance(tokens, Vocabulary) or context is None:
        raise RequestError(
            f"toolkit generate: {trained.config.job} of run {trained.run.id} is not a language model: it sets neither "
            "`tokens` nor `context`, see jobs/language_model.py"
        )
    rows = []
    for number, text in enumerate(texts):
        # The model must see all of the text and what is to follow.
        prompt = tokens.encode(text)
        if len(prompt) + (most or 1) > context:
            raise RequestError(
                f"toolkit generate: {shortened(text)} has {len(prompt)} tokens, which with {most or 1} more are over "
                f"the {context} that the model was trained on; shorten it, or lower --max-tokens"
            )
        draw = torch.Generator().manual_seed(sampling.seed + number)
        room = min(MOST, context - len(prompt)) if most is None else most
        rows.append(_Text(text, prompt, room, tokens.index.end, draw))
    # One pass takes as many texts as its logits may take memory.
    at_once = max(1, limits().logits_at_once // (context * tokens.index.vocabulary))
    for start in range(0, len(rows), at_once):
        _extend(trained, rows[start : start + at_once], tokens.index.vocabulary, sampling)
    return [
        {"prompt": row.text, "text": tokens.decode(row.added), "tokens": len(row.added), "ended": row.has_ended}
        for row in rows
    ]


def shortened(text: str) -> str:
    """Return the beginning of a text in quotes, on one line."""
    return repr(text if len(text) <= 48 else f"{text[:45]}...")


@torch.no_grad()
def _extend(trained: Trained, rows: Sequence[_Text], vocabulary: int, sampling: Sampling) -> None:
    """Add tokens to the rows until each is over."""
    while going := [row for row in rows if not row.is_over]:
        batch = torch.zeros(len(going), max(len(row.ids) for row in going), dtype=torch.int64)
        for place, row in enumerate(going):
            batch[place, : len(row.ids)] = torch.tensor(row.ids)
        with training_precision(trained):
            logits = trained.model(batch.to(trained.device))
        ends = [len(row.ids) - 1 for row in going]
        # A model with more outputs than the tokenizer has tokens was never trained on the others.
        last = logits[range(len(going)), ends, :vocabulary].float().cpu()
        for row, outputs in zip(going, last, strict=True):
            row.ids.append(sampling.choose(outputs, row.draw))
