"""transformers' Trainer under the toolkit: ``trainer.train(resume_from_checkpoint=resume.checkpoint)``."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from toolkit.base import logs
from toolkit.data.randomness import generators_kept, seed_cpu
from toolkit.plugins.integrations.library_run import LibraryRun
from toolkit.train.feed import set_for_now

log = logs.get(__name__)


class TransformersCallback(TrainerCallback):
    """Stops all ranks together, saves the trainer's own checkpoint, and reports to the toolkit.

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        resume = TransformersCallback(trainer)
        trainer.train(resume_from_checkpoint=resume.checkpoint)

    It adds itself to the trainer. All ranks stop after the same step, and a step is one of the optimizer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._run = LibraryRun("transformers", self._save)
        self._run.refuse_other_world(trainer.args.world_size)
        args = trainer.args
        self._samples = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        self._epochs = itertools.count()
        self._is_put_off = False  #: no save or stop after this step, but after the next
        trainer.add_callback(self)

    @property
    def checkpoint(self) -> str | None:
        """The newest whole checkpoint of the run, for ``resume_from_checkpoint``; None in a new run."""
        folder = self._run.checkpoint
        return None if folder is None else str(next(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")))

    def _save(self, folder: Path) -> None:
        # Whatever the script leaves out of its own checkpoints: this one must hold all, and goes nowhere else.
        trainer = self._trainer
        with set_for_now(trainer.args, output_dir=str(folder), save_only_model=False, push_to_hub=False):
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._run.checkpoint is not None:
            self._restore_callbacks(state)
        self._epochs = itertools.count(int(state.epoch or 0))  # the trainer's own stands still without a length
        self._run.begin(state.max_steps)

    def _restore_callbacks(self, state: TrainerState) -> None:
        """Fill the callbacks from the checkpoint: an EarlyStoppingCallback would count from 0 again.

        ``restore_callback_states_from_checkpoint`` would make new ones, which a class of the script may not allow.
        """
        by_class: dict[str, list[TrainerCallback]] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                by_class.setdefault(type(callback).__name__, []).append(callback)
        for name, callbacks in by_class.items():
            saved = state.stateful_callbacks.get(name, [])
            # Those of several callbacks of one class are a list, to which each save appends.
            newest = (saved if isinstance(saved, list) else [saved])[-len(callbacks) :]
            for callback, found in zip(callbacks, newest, strict=False):
                vars(callback).update(found.get("attributes", {}))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **more: Any) -> None:
        epoch = next(self._epochs)
        loader = more["train_dataloader"]
        loader = getattr(loader, "base_dataloader", loader)  # accelerate's wraps one
        if not isinstance(loader.dataset, SeededFetch):
            kind = SeededStream if isinstance(loader.dataset, IterableDataset) else SeededFetch
            kind(loader, (self._run.config.train.seed, args.seed))
        elif not has_length(loader):
            log.warning(
                "train_dataset has no length and begins again: after a resume from here on the trainer would not find "
                "its place. Give it a __len__, or let one pass be endless; max_steps ends it"
            )
        loader.dataset.begin_epoch(epoch)
        # The trainer does not reach a batch sampler with a `set_epoch` of its own where it skips batches on several
        # ranks, and the resumed epoch would have the first one's order.
        sampler = loader.batch_sampler
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "batch_sampler", None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # trl's GRPO and RLOO generate texts for several batches, and use them several times. No checkpoint holds them.
        batches = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)
        uses_generated = state.global_step * args.gradient_accumulation_steps % batches != 0
        if not uses_generated:
            # An evaluation that comes now would be left out after a resume, and with it the random numbers that it
            # draws. Where each place has one, every second is taken.
            is_before_more = control.should_evaluate or (state.epoch or 0.5) % 1 == 0
            self._is_put_off = is_before_more and not self._is_put_off
        # After the last step the trainer is on its way out. From a checkpoint of that step it would make one more.
        may_save = not (uses_generated or self._is_put_off) and state.global_step < state.max_steps
        self._run.step_made(self._samples, may_save=may_save)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.finish()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._run.log_all(more.get("logs") or {})

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._run.note_progress()

    on_prediction_step = on_evaluate = on_predict = on_substep_end


class SeededFetch:
    """Stands for the data set and the collator of a DataLoader with a batch sampler.

    What they draw for a batch (masks of words, crops of pictures) depends on the seed, the epoch and the batch's
    indices only. From the process's generators a resume that skips batches would draw other numbers for the rest of the
    epoch. What the process draws elsewhere does not depend on them.
    """

    def __init__(self, loader: DataLoader[Any], seed: object) -> None:
        """Take the place of what ``loader`` has. ``seed`` counts as text."""
        self._dataset, self._collate, self._seed = loader.dataset, loader.collate_fn, seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that persist see it, too
        self._batch: list[Any] = []  #: what identifies the next batch within its epoch
        loader.collate_fn = self.collate
        # DataLoader refuses another data set, since its sampler has the old one's length; here it stays the same.
        object.__setattr__(loader, "dataset", self)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # not unpickled yet, in a worker
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the samples of a batch. torch's DataLoader calls it before the collator."""
        self._batch = list(indices)
        fetch = getattr(self._dataset, "__getitems__", None)
        with self._seeded("samples", self._batch):
            return [self._dataset[index] for index in indices] if fetch is None else fetch(indices)

    def collate(self, samples: Any) -> Any:
        """Return the batch of ``samples``."""
        with self._seeded("batch", self._batch):
            return self._collate(samples)

    def begin_epoch(self, number: int) -> None:
        """Draw as in epoch ``number`` from here on."""
        self._epoch.fill_(number)

    @contextmanager
    def _seeded(self, *what: object) -> Iterator[None]:
        """Draw from generators that ``what`` has for itself in this epoch."""
        text = repr((self._seed, int(self._epoch), *what))
        with generators_kept():
            seed_cpu(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
            yield


class SeededStream(SeededFetch, IterableDataset[Any]):
    """Stands for an iterable data set. What is drawn depends on the numbers of sample and batch in this process."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        samples, is_over = iter(self._dataset), object()
        self._batch = [place, 0]
        for number in itertools.count():
            with self._seeded("sample", place, number):
                sample = next(samples, is_over)
            if sample is is_over:
                return
            yield sample

    def collate(self, samples: Any) -> Any:
        batch = super().collate(samples)
        self._batch[1] += 1
        return batch
