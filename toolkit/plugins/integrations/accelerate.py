"""accelerate under the toolkit: ``for epoch in run.epochs(3): for batch in run.steps(loader): ...``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer

from toolkit.plugins.integrations.library_run import LibraryRun
from toolkit.ranks.state import Json
from toolkit.train.feed import set_for_now
from toolkit.train.handed_over import Accumulation


class AccelerateRun(LibraryRun):
    """Goes through the epochs and batches still to be made, and saves by ``accelerator.save_state``.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        run = AccelerateRun(accelerator)
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                ...
                run.log(loss=loss)

    Make it once, when all is prepared: it loads the newest whole checkpoint. Between two steps all ranks stop together
    if that is agreed. A loop that is left by a ``break`` ends with ``run.finish()``.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        super().__init__("accelerate", self._save_files)
        self._buckets.add_around(accelerator._models)
        self.refuse_other_world(accelerator.num_processes)
        # For scripts that accumulate gradients without ``accelerator.accumulate``.
        optimizers = [prepared.optimizer for prepared in accelerator._optimizers]
        self._accumulation = Accumulation([each for each in optimizers if isinstance(each, Optimizer)])
        if self.checkpoint is not None:
            accelerator.load_state(str(self.checkpoint))
            project = accelerator.project_configuration
            project.iteration = int(self.meta.get("iteration", project.iteration))  # of the script's own checkpoints

    def _save_files(self, folder: Path) -> None:
        # With automatic names accelerate would choose another folder, and remove the script's own checkpoints there.
        project = self._accelerator.project_configuration
        with set_for_now(project, automatic_checkpoint_naming=False, iteration=project.iteration):
            self._accelerator.save_state(str(folder))

    def _saved_with(self) -> dict[str, Json]:
        return {**super()._saved_with(), "iteration": self._accelerator.project_configuration.iteration}

    def epochs(self, count: int) -> Iterator[int]:
        yield from super().epochs(count)
        self.finish()

    def _is_there(self, loader: Any) -> bool:
        """True if accelerate has restored the loader's position, as it does with ``use_stateful_dataloader``."""
        return self.checkpoint is not None and getattr(loader, "use_stateful_dataloader", False)

    def _after_step(self) -> bool:
        return self._accelerator.sync_gradients and super()._after_step()  # a checkpoint holds no gradients
