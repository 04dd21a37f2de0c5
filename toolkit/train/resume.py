"""Whether a run may go on from a checkpoint, and what differs where it does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, ConfigError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import Manifest
from toolkit.config import JobConfig, goes_on_with
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import REPLICA, InRounds
from toolkit.train.state import MESH, TrainingState

log = logs.get(__name__)

#: The ``kind`` in the identity of a run whose loop is the user's own.
OWN_LOOP = "a loop of one's own"


def refuse_another_run(checkpoints: CheckpointFolder, state: TrainingState, world_size: int) -> None:
    """Raise ConfigError where the newest readable checkpoint does not fit this run. Nothing is filled yet.

    Without this check another model would fail later, with a list of tensors that says less.
    """
    for path in checkpoints.list():
        manifest = manifest_or_none(checkpoints, path)
        if manifest is None:
            continue
        refuse_other_identity(manifest.meta.get("identity", {}), state.identity, path)
        then = manifest.world_size
        if then != world_size and any(name.startswith("data/rank") for name in manifest.values):
            raise ConfigError(
                f"{path} cannot be continued on {world_size} ranks: each of {then} ranks had read its own stream, or "
                "its own part of the data (data.split), up to some point, and what is left cannot be shared out anew. "
                f"Go on with {then} ranks (cluster.nodes x cluster.tasks_per_node), or start a new run with "
                "`toolkit submit`"
            )
        _refuse_inside_a_round(checkpoints, state, manifest, path, world_size)
        return


def refuse_other_identity(saved: Mapping[str, Json], current: Mapping[str, Json], where: Path) -> None:
    """Raise ConfigError, naming every key whose value differs from that in the checkpoint ``where``."""
    changed = [
        key for key in current if key in saved and key != MESH and not goes_on_with(key, saved[key], current[key])
    ]
    if changed:
        values = "; ".join(f"{key} was {saved[key]!r} and is now {current[key]!r}" for key in changed)
        raise ConfigError(
            f"{where} cannot be continued: {values}. Set {'them' if len(changed) > 1 else 'it'} back, "
            f"or start a new run with `toolkit submit` (from these weights: model.init_from={where})"
        )


def _refuse_inside_a_round(
    checkpoints: CheckpointFolder, state: TrainingState, manifest: Manifest, path: Path, now: int
) -> None:
    # Replicas that differ can go on only under the same strategy and on as many ranks.
    then, strategy = manifest.world_size, state.source
    if isinstance(strategy, InRounds):
        strategy.enter(manifest.step, [*manifest.tensors, *manifest.values])  # on every rank, or on none
    if not _is_inside_a_round(manifest) or (then == now and isinstance(strategy, InRounds)):
        return
    # Name a checkpoint at a round's end as a way out, if there is one.
    way_out = ""
    for other in checkpoints.list():
        readable = manifest_or_none(checkpoints, other)
        if readable is not None and not _is_inside_a_round(readable):
            way_out = f", or from {other.name}, which is at a round's end: move the newer ones away"
            break
    raise ConfigError(
        f"{path} was made inside a round of local_sgd, in which each of {then} ranks has weights of its own: only "
        f"local_sgd on {then} ranks (cluster.nodes x cluster.tasks_per_node) goes on from it. Go on with these"
        f"{way_out}; checkpoints every multiple of strategy.local_sgd.round_steps "
        "(checkpoint.every_steps) fit any number"
    )


def manifest_or_none(checkpoints: CheckpointFolder, path: Path) -> Manifest | None:
    """Return the manifest; None for a damaged one, which a load will skip and report. Files' sizes are not checked."""
    try:
        return checkpoints.manifest(path, sizes=False)
    except CheckpointError:
        return None


def _is_inside_a_round(manifest: Manifest) -> bool:
    return any(name.startswith(REPLICA) for name in manifest.tensors)


def log_what_differs(saved: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    """Warn about conditions in the meta data ``saved`` that differ from those in ``now``. None refuses a resume."""
    then, here = _circumstances(saved), _circumstances(now)
    others = [key for key in here if key in then and then[key] != here[key]]
    changed = [f"{key} ({then[key]} -> {here[key]})" for key in others]
    # Another number of ranks changes the batches of any loader but the toolkit's, which has a global batch size.
    identity = _mapping(now.get("identity", {}))
    if "world size" in others and identity.get("kind") == OWN_LOOP and "global batch size" not in identity:
        log.warning(
            "from here on results differ from those of an undisturbed run, because of another %s: each rank's loader "
            "has other batches, and the rest of this epoch may repeat or leave out samples; run.loader goes on exactly",
            ", ".join(changed),
        )
    elif changed:
        log.warning("from here on results equal those of an undisturbed run to rounding only, not bit for bit, "
                    "because of another %s", ", ".join(changed))  # fmt: skip


def _circumstances(meta: Mapping[str, Json]) -> dict[str, Json]:
    """Return the conditions that a save wrote down, with the strategy's name and the mesh."""
    identity = _mapping(meta.get("identity", {}))
    strategy = identity.get("strategy.name", JobConfig().strategy.name)
    mesh = {"mesh": identity[MESH]} if MESH in identity else {}
    return {**_mapping(meta.get("conditions", {})), "strategy": strategy, **mesh}


def _mapping(value: Json) -> Mapping[str, Json]:
    assert isinstance(value, Mapping)
    return value
