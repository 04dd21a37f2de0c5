"""Loading: fill live tensors from the newest checkpoint that every rank can verify.

Rank 0 proposes a name, all ranks read and verify their part of it, and the worst result decides for all. A damaged
checkpoint is skipped and the next older one tried. One that does not fit the model is an error.

A shard may have been cut differently when it was saved, on any number of ranks: it is put together from the stored
parts that overlap it. Values of one rank alone (PerRank) fit only the same number of ranks, or are averaged over the
ranks that stored them, where the state says so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from toolkit.base import fsio, logs
from toolkit.base.errors import CheckpointError, listing
from toolkit.checkpoint import tensors
from toolkit.checkpoint.exchange import Exchange, KeyValueStore, describe, failures_told
from toolkit.checkpoint.folder import CheckpointFolder, step_of
from toolkit.checkpoint.manifest import FILES, CorruptCheckpointError, Manifest, TensorRecord, ValueRecord, check_parts
from toolkit.checkpoint.writer import KINDS
from toolkit.ranks.state import OPTIONAL, Entry, Json, PerRank, Sharded, State, pieces_of

#: Number of tensors that a rank reads at the same time.
READERS = 4

log = logs.get(__name__)


@dataclass(frozen=True)
class Loaded:
    """What was loaded besides the tensors, which are filled in place."""

    step: int
    meta: Mapping[str, Json]
    values: Mapping[str, Json]  # the entries of this rank's state that are not tensors
    path: Path
    skipped: Mapping[str, str] = field(default_factory=dict)  # name of each newer, damaged checkpoint: what is wrong


def load(
    checkpoints: CheckpointFolder,
    state: State | Callable[[Manifest], State],
    *,
    rank: int,
    world_size: int,
    kv: KeyValueStore | None,
    attempt: int = 1,
    timeout_s: float = 600.0,
    read_only: bool = False,
    newest: int | None = None,
    fetch: Callable[[Collection[str]], Path | None] = lambda _: None,
    refuse_none: Callable[[], None] = lambda: None,
) -> Loaded | None:
    """Fill `state` from the newest good checkpoint. Return None, with `state` unchanged, if there is no checkpoint.

    `newest`: use only checkpoints up to this step; rank 0's value counts. `state` may be a callable that returns the
    state for a manifest, without a collective, where what there is to fill depends on the checkpoint. Each time that
    one is found damaged, `fetch` is called on rank 0 with the names of all that are. It may bring a good one from
    elsewhere, and returns its path. `refuse_none` is called on rank 0 where there is no checkpoint, and may raise.

    All ranks call it, and all return the same step or all raise. CheckpointError when the checkpoint does not fit
    `state` (every difference is listed), when a newer toolkit wrote it, or when none of those present is good: starting
    from step 0 silently would throw the run away. After an error the tensors may hold anything.

    The run's writer refuses (CheckpointError) what users other than this one and root own or may write. Once a good one
    is found it moves damaged checkpoints aside, and it removes what dead writers left over. `read_only` (evaluation,
    export: perhaps next to a live writer, perhaps another user's run) checks no owner and changes no file.
    """
    number = checkpoints.next_exchange_number()
    topic = f"checkpoint/{checkpoints.folder.name}/{attempt}"
    talk = Exchange(kv, rank=rank, world_size=world_size, topic=topic, number=number, timeout_s=timeout_s)

    def note_progress() -> None:
        checkpoints.on_progress()
        talk.note_busy()

    read = partial(_read, checkpoints, state, rank, world_size, note_progress)
    if rank == 0:
        with failures_told(talk, f"no checkpoint was loaded from {checkpoints.folder}"):
            loaded = _lead(checkpoints, read, talk, read_only, newest, fetch)
            if loaded is None:
                refuse_none()
            talk.tell({"done": loaded is not None, "skipped": dict(loaded.skipped) if loaded else {}})
            return loaded
    # Read what is proposed and report, until rank 0 says that it is done.
    loaded = None
    while "try" in (word := talk.listen()):
        try:
            loaded = read(word["try"])
            talk.report({})
        except Exception as error:
            damaged = isinstance(error, CorruptCheckpointError)
            text = f"rank {rank} on {socket.gethostname()}: {describe(error)}"
            talk.report({"damaged" if damaged else "error": text})
    if not word["done"]:
        return None
    assert loaded
    return replace(loaded, skipped=word["skipped"])


def _read(
    checkpoints: CheckpointFolder,
    places: State | Callable[[Manifest], State],
    rank: int,
    world_size: int,
    on_progress: Callable[[], None],
    name: str,
) -> Loaded:
    """Verify and fill this rank's part of the checkpoint `name`."""
    path = checkpoints.named(name)
    # Rank 0 checks for all ranks what does not depend on the rank: file sizes, and a library's files.
    manifest = checkpoints.manifest(path, sizes=rank == 0)
    records = manifest.tensors.items() if rank == 0 else ()
    files = {name: record for name, record in records if name.startswith(FILES)}
    # The ranks divide the headers: otherwise a thousand ranks would open a thousand files each.
    headers = manifest.headers[rank::world_size]
    check_parts(path, replace(manifest, tensors=files, headers=headers).parts())
    return fill_state(places, manifest, path, rank, world_size, on_progress)


def fill_state(
    places: State | Callable[[Manifest], State],
    manifest: Manifest,
    path: Path,
    rank: int,
    world_size: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Loaded:
    """Fill one rank's `places` from the files in `path`, which `manifest` describes, and verify what is read.

    Raises CheckpointError where they do not fit, CorruptCheckpointError where a digest is wrong.
    """
    state = places(manifest) if callable(places) else places
    # Compare everything first: a checkpoint that does not fit is refused before any tensor is filled.
    problems = _differences(manifest, state, rank, world_size)
    if problems:
        raise CheckpointError(f"{path} does not fit this model and strategy: {listing(problems, 20)}")
    # Optional entries that the checkpoint lacks keep their values.
    there = manifest.tensors
    with ThreadPoolExecutor(READERS) as pool:  # reading and the crc32 release the interpreter lock
        fills = []
        for name, entry in state.items():
            is_absent = name not in there and name.startswith(OPTIONAL)
            if isinstance(entry.value, torch.Tensor) and not is_absent:
                records = {source: there[source] for source in _sources(name, entry, manifest, rank, world_size)}
                fills.append(pool.submit(_fill, entry, entry.value, path, records))
        # Report progress as each tensor completes; the first failure cancels those not yet begun.
        for fill in as_completed(fills):
            try:
                fill.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            on_progress()
    values = {key: record.value for key, record in manifest.values.items() if key in state}
    return Loaded(manifest.step, manifest.meta, values, path)


def _lead(
    checkpoints: CheckpointFolder,
    read: Callable[[str], Loaded],
    talk: Exchange,
    read_only: bool,
    newest: int | None,
    fetch: Callable[[Collection[str]], Path | None],
) -> Loaded | None:
    """Run rank 0's side: propose checkpoints, newest first, until all ranks have verified one."""
    skipped: dict[str, str] = {}
    # The writer trusts no folder that others can change: a checkpoint decides what the run continues with.
    if not read_only:
        checkpoints.refuse_untrusted(checkpoints.folder)
        checkpoints.remove_leftovers()
    while True:
        paths = (path for path in checkpoints.list() if newest is None or step_of(path) <= newest)
        path = next((path for path in paths if path.name not in skipped), None)
        if path is None:
            break
        if not read_only:
            checkpoints.refuse_untrusted(path)
        loaded, reason = _propose(read, talk, path.name)
        if loaded is None:
            skipped[path.name] = reason
            log.warning("skipping %s, the next older checkpoint is tried: %s", path.name, reason)
            fetched = fetch(skipped)
            if fetched is not None:
                skipped.pop(fetched.name, None)
            continue
        # A good one is found: only now is it safe to move the damaged ones out of the way.
        for name in () if read_only else skipped:
            if fsio.is_there(checkpoints.folder / name):  # a copy that could not be completed may have moved it already
                checkpoints.reject(checkpoints.folder / name, skipped[name])
        log.info("resuming from %s", path)
        return replace(loaded, skipped=skipped)
    # Checkpoints exist, but none is good: do not start again from step 0 silently.
    if skipped:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in skipped.items())
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints is usable, and all were left in place; restore one from a backup "
            f"or start a new run:{reasons}"
        )
    return None


def _propose(read: Callable[[str], Loaded], talk: Exchange, name: str) -> tuple[Loaded | None, str]:
    """Let all ranks read `name`. Return what rank 0 loaded, or None and the reasons why some rank found damage."""
    talk.tell({"try": name})
    loaded, reasons = None, list[str]()
    refused = None
    try:
        loaded = read(name)
    except CorruptCheckpointError as error:
        reasons.append(str(error))
    except CheckpointError as error:  # raised only after gather(), when the others have reported
        refused = error
    reports = talk.gather()
    if refused:
        raise refused
    reasons += [report["damaged"] for report in reports.values() if "damaged" in report]
    return (None, "; ".join(reasons)) if reasons else (loaded, "")


def _sources(name: str, entry: Entry, manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """Return the names in the checkpoint whose values belong into `entry`.

    It is `name` itself, or each rank's where the world size differs and the state asks for an average.
    """
    if manifest.world_size == world_size or not _averages(entry):
        return [name]
    return [name.replace(f"/rank{rank}/", f"/rank{other}/", 1) for other in range(manifest.world_size)]


def _fill(entry: Entry, live: torch.Tensor, folder: Path, records: Mapping[str, TensorRecord]) -> None:
    """Fill `live` from the stored part with its place and shape. Without one, use all parts that overlap it."""
    if len(records) > 1:
        # Several records: fill with their mean. The sum is in float64 and in the order of the ranks, so that all ranks
        # that read it get the same bits.
        total = torch.zeros(live.shape, dtype=torch.float64)
        one = torch.empty(live.shape, dtype=live.dtype)
        for name, record in records.items():
            tensors.fill(name, one, folder, record.parts[0])
            total += one
        live.copy_(total / len(records))
        return
    for value, offsets in pieces_of(entry):
        place = offsets, tuple(value.shape)
        for name, record in records.items():
            same = next((part for part in record.parts if (part.offsets, part.shape) == place), None)
            if same is not None:
                tensors.fill(name, value, folder, same)
            else:
                tensors.assemble(name, value, offsets, folder, record.parts)


def _differences(manifest: Manifest, state: State, rank: int, world_size: int) -> list[str]:
    """Return every difference between the checkpoint and this rank's live state, one phrase each."""
    stored: dict[str, TensorRecord | ValueRecord] = {**manifest.tensors, **manifest.values}
    used: dict[str, Entry] = {}
    for name, entry in state.items():
        used |= dict.fromkeys(_sources(name, entry, manifest, rank, world_size), entry)
    missing, unexpected, wrong = list[str](), list[str](), list[str]()
    for name, entry in used.items():
        if name not in stored:
            if not name.startswith(OPTIONAL):
                missing.append(f"{name} is not in the checkpoint")
        elif (text := _difference(name, entry, stored[name])) is not None:
            wrong.append(text)
    # A rank must have a place for each stored entry that is not optional, not a library's and not another rank's.
    for name, record in stored.items():
        if isinstance(record, ValueRecord):
            of_this_rank = record.rank == rank
        else:
            of_this_rank = record.parts[0].file.startswith(f"rank-{rank:05d}.")  # in whichever format
        is_needed = of_this_rank or record.kind != "per_rank"
        if is_needed and name not in used and not name.startswith((*OPTIONAL, FILES)):
            unexpected.append(f"{name} is only in the checkpoint")
    # Values of one rank alone fit only the same number of ranks, unless they are averaged.
    own = (n for n, record in stored.items() if record.kind == "per_rank" and not n.startswith(OPTIONAL))
    if any(not _averages(used.get(name)) for name in own) and manifest.world_size != world_size:
        wrong.append(f"it holds values of each of {manifest.world_size} ranks, and now there are {world_size}")
    return missing + unexpected + wrong


def _averages(entry: Entry | None) -> bool:
    return isinstance(entry, PerRank) and entry.averages


def _difference(name: str, entry: Entry, record: TensorRecord | ValueRecord) -> str | None:
    """Return what is different about one value, or None."""
    kind = KINDS[type(entry)]
    # A sharded and a replicated tensor may fill each other; a rank's own value may fill neither.
    if record.kind != kind and "per_rank" in (record.kind, kind):
        return f"{name} is {record.kind} in the checkpoint and {kind} here"
    if not isinstance(entry.value, torch.Tensor):
        return f"{name} is a tensor only in the checkpoint" if isinstance(record, TensorRecord) else None
    if isinstance(record, ValueRecord):
        return f"{name} is a tensor only here"
    shape = entry.global_shape if isinstance(entry, Sharded) else tuple(entry.value.shape)
    dtype = tensors.dtype_name(entry.value)
    if (record.dtype, record.shape) == (dtype, shape):
        return None
    return f"{name} is {record.dtype} {record.shape} in the checkpoint and {dtype} {shape} here"
