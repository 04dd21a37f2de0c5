"""`train.on_nan`: end a training whose loss is not finite. Its weights are of no use any more.

The loop checks at logging steps and before saves, where the host waits for the device anyway. One mean that is not
finite is a warning. At the second in a row the attempt fails; the error names the step, its samples, and the first
layer whose output is not finite with the weights of the last checkpoint. The run is given up, because the same steps
would follow again from there. Weights that are not finite are not saved: the newest checkpoint stays fit for a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import TrainConfig, choose
from toolkit.data.loader import Batches
from toolkit.hang import activity
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import InRounds, Strategy
from toolkit.train.seeds import reseed

log = logs.get(__name__)


class NotFinite:
    """Checks the loss and the weights. Every rank makes the same calls and comes to the same result.

    ``roll_back(step, newest)`` is that of the run's checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        strategy: Strategy,
        loader: Batches,
        roll_back: Callable[[int, int], int | None],
    ) -> None:
        self.stops = choose("train.on_nan", config.on_nan, {"stop": True, "warn": False})
        self.count = 0  #: number of logging steps whose mean loss was not finite, in the whole run
        self._seed = config.seed
        self._activity = session.activity
        self._strategy, self._loader, self._roll_back = strategy, loader, roll_back
        self.weights_were_finite = True  #: when a save was asked for last
        self._row = 0  #: means in a row that are not finite
        self._since: int | None = None  #: the first step of that row

    def judge(self, step: int, loss: float, losses: list[Tensor]) -> None:
        """Check ``loss``, the mean of the steps before ``step``.

        ``losses`` are the sums of this rank's parts after each of these steps. With ``train.on_nan: stop``, raises
        ConfigError at the second mean in a row that is not finite.
        """
        if math.isfinite(loss):
            self._row, self._since = 0, None
            return
        self._row, self.count = self._row + 1, self.count + 1
        if self._row == 1:
            self._since = self._first(step, losses)
            log.warning("the loss is %s since step %d (samples %s)", loss, self._since, self._samples(self._since))
        elif self.stops:
            self.refuse(step)

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint must hold. A stop does not end the row of bad means."""
        return {"finite": self.weights_were_finite, "not_finite": {"row": self._row, "since": self._since}}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint whose ``meta`` has a :meth:`state`; those of older versions have none."""
        self.weights_were_finite = meta.get("finite", True)
        if (saved := meta.get("not_finite")) is not None:
            self._row, self._since = saved["row"], saved["since"]

    def may_save(self, step: int, *, is_last: bool) -> bool:
        """True if all weights are finite on all ranks, or ``train.on_nan`` is ``warn``.

        A collective and a host sync. Raises ConfigError after the last step, which must be saved.
        """
        self.weights_were_finite = weights_are_finite(self._strategy)
        if self.weights_were_finite or not self.stops:
            return True
        if is_last:
            self.refuse(step)
        log.warning("step %d is not saved: the weights are not finite", step)
        return False

    def refuse(self, step: int) -> NoReturn:
        """Raise ConfigError after ``step`` steps. All ranks call it: to find the layer they load a checkpoint."""
        what = "the weights are not finite after the last step"
        if self._since is not None:
            what = f"the loss is not finite since step {self._since} (samples {self._samples(self._since)})"
        raise ConfigError(
            f"train.on_nan: {what}; {self._cause(step)}. Look at these samples and at optim.lr, optim.warmup_steps and "
            "train.clip_norm, or set train.skip_bad_steps: true, then resume; train.on_nan: warn trains on"
        )

    def _first(self, step: int, losses: list[Tensor]) -> int:
        """Return the first step whose loss was not finite; a collective."""
        totals = self._strategy.sum({str(index): loss for index, loss in enumerate(losses)})
        first = next((index for index, total in enumerate(totals.values()) if not math.isfinite(total)), 0)
        return step - len(losses) + first

    def _samples(self, step: int) -> str:
        return listing(list(map(str, self._loader.global_samples(step))), 8)

    def _cause(self, step: int) -> str:
        """Return what is wrong, as the end of a sentence. It names the layer where the strategy can find it.

        It is searched for with the weights of a checkpoint from before the first bad step, if there is one.
        """
        bad = bad_weights(self._strategy.live())
        now = f"of this rank's weights {len(bad)} are not finite: {listing(bad, 3)}" if bad else "the weights are"
        first_bad_layer = getattr(self._strategy, "first_bad_layer", None)
        if first_bad_layer is None or isinstance(self._strategy, InRounds) or self._since is None:
            return now
        # Repeat the first bad step on weights that were still good, with the same batch and random numbers.
        self._activity.phase = activity.LOADING
        good_step = self._roll_back(step, self._since)
        try:
            batch = self._loader.at(self._since)
        except ValueError:  # a stream cannot go back
            return now
        reseed(self._seed, self._since, self._strategy.share.index)
        layer = first_bad_layer(batch)
        weights = "the weights as they are now"
        if good_step is not None:
            weights = f"the weights of the checkpoint of step {good_step}"
        if layer is None:
            return f"with {weights} all layers give finite values for these samples: the training has diverged since"
        return f"with {weights} the first output for these samples that is not finite is that of {layer}"


class Weighed(Protocol):
    """Weights on every rank, of a strategy or of a user's own loop."""

    def live(self) -> Mapping[str, Tensor]: ...

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]: ...


def weights_are_finite(held: Weighed) -> bool:
    """True if all weights are finite on all ranks; a collective and a host sync."""
    return held.sum({"bad": float(bool(bad_weights(held.live())))})["bad"] == 0


def bad_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in ``Strategy.live()`` of weights, or parts of them, that are not finite. A host sync."""
    live: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("weights/") and (value.is_floating_point() or value.is_complex()) and value.numel():
            # torch has no norm for floats of one byte.
            live[name.removeprefix("weights/")] = value.detach().float() if value.itemsize == 1 else value.detach()
    if not live:
        return []
    largest = torch._foreach_norm([*live.values()], math.inf)  # the largest, or NaN
    is_finite = torch.stack([value.double() for value in largest]).isfinite().tolist()
    return [name for name, fine in zip(live, is_finite, strict=True) if not fine]
