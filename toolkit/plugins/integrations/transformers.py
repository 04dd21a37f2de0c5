"""transformers' Trainer under the toolkit: ``trainer.train(resume_from_checkpoint=resume.checkpoint)``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from toolkit.base import logs
from toolkit.plugins.integrations.library_run import LibraryRun
from toolkit.plugins.integrations.seeded_fetch import SeededFetch, SeededStream
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
        # ranks, and the epoch that goes on would have the first one's order.
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
