"""Lightning under the toolkit: ``Trainer(callbacks=[resume])``, ``trainer.fit(..., ckpt_path=resume.checkpoint)``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer

from toolkit.plugins.integrations.library_run import LibraryRun
from toolkit.train.feed import end_workers

FILE = "lightning.ckpt"


class LightningCallback(Callback):
    """Stops all ranks after the same step, saves by ``trainer.save_checkpoint``, and reports to the toolkit.

        resume = LightningCallback()
        trainer = L.Trainer(max_epochs=3, callbacks=[resume])
        trainer.fit(model, loader, ckpt_path=resume.checkpoint)

    Make it in the script, once. Before each step it seeds all random generators by the step and the rank, which
    Lightning does not save.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._is_put_off = False  #: no save or stop after this step, but after the next
        self._run = LibraryRun("lightning", self._save)

    @property
    def checkpoint(self) -> str | None:
        """The newest whole checkpoint of the run, for ``ckpt_path``; None in a new run."""
        return None if self._run.checkpoint is None else str(self._run.checkpoint / FILE)

    def _save(self, folder: Path) -> None:
        assert self._trainer is not None
        self._trainer.save_checkpoint(folder / FILE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._run.refuse_other_world(trainer.world_size)
        self._trainer = trainer
        # Last: what other callbacks do after a step, as averaging weights, is then in the checkpoint of that step.
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        # Lightning's own handlers call a collective wherever the signal meets a rank, and requeue the job.
        trainer._signal_connector.register_signal_handlers = lambda: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._run.begin(None if math.isinf(total) else int(total))
        # Begin the epoch's data as in an undisturbed run. Batches that are done are read again. Lightning would begin a
        # plain loader at its first batch again, in the order of epoch 0.
        fetcher, loaders = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader.flattened
        if not any(hasattr(loader, "load_state_dict") for loader in loaders):
            for loader in loaders:
                _set_sampler_epoch(loader, trainer.current_epoch)
                end_workers(loader)
            self._run.seed(-1 - trainer.current_epoch)
            iter(fetcher)
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            for _ in range(done if done < trainer.fit_loop.max_batches else 0):
                next(fetcher)
                self._run.note_progress()
            fetcher.fetched = 0
        self._run.seed(self._run.step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if trainer.current_epoch > 0 and not (loop.is_resuming or loop.epoch_loop.restarting):  # else they are in use
            for loader in loop._combined_loader.flattened:
                end_workers(loader)
        self._run.seed(-1 - trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._run.note_progress()
        loop = trainer.fit_loop
        if loop._should_accumulate():  # a checkpoint holds no gradients
            return
        # From a checkpoint after an epoch's last batch Lightning would come back to a wrong epoch. A validation that
        # comes now would be left out after a resume. Where each step has one, every second one may be saved.
        epoch = loop.epoch_loop
        is_last = epoch._num_ready_batches_reached()
        if not is_last:
            is_by_time = getattr(trainer, "_val_check_time_interval", None) is not None  # by each rank's own clock
            validates = not is_by_time and epoch._should_check_val_fx(loop._data_fetcher)
            self._is_put_off = validates and not self._is_put_off
        may_save = not (is_last or self._is_put_off)
        self._run.step_made(values=trainer.callback_metrics, may_save=may_save)
        self._run.seed(self._run.step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fit_loop.max_batches <= trainer.accumulate_grad_batches:  # there is no other place
            self._run.checkpoint_if_due()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.save_the_end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.finish()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.validating:
            self._run.log_all(trainer.callback_metrics)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._run.note_progress()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
