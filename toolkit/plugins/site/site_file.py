"""What `toolkit site init` writes: the defaults of a site as a commented site.yaml, and a JSON schema of the config.

The schema is for editors, of draft 7, which they know best. What it refuses `toolkit submit` refuses, too, and more:
whether keys fit each other, the job and the site.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from toolkit import __version__
from toolkit.base import fsio
from toolkit.base.durations import in_units
from toolkit.base.errors import RequestError, did_you_mean, listing
from toolkit.cli.keys import about_of, comments_of
from toolkit.config import ClusterConfig, JobConfig
from toolkit.config.layers import site_path
from toolkit.config.yaml_core import dump
from toolkit.constraints import Limit, OneOf, Range, container_of, hints_of, item_hints, kinds_of, limits_of, words_of
from toolkit.plugins.site.site_profile import AssociationRecord, PartitionRecord, SiteProfile

#: Left for the checkpoint and the requeue, in addition to the time that a preemption gives.
SIGNAL_DELAY_S = ClusterConfig().save_before_limit_s


def write(text: str, *, force: bool) -> Path:
    """Write the site's file and return its path. Raises RequestError if there is one, without ``force``."""
    path = site_path().absolute()
    if os.path.lexists(path) and not force:
        raise RequestError(f"{path} already exists and is kept; --force replaces it, --print only shows the new one")
    fsio.make_dir(path.parent, parents=2)
    fsio.write_atomic(path, text)
    return path


def text_of(profile: SiteProfile, partition: str | None) -> str:
    """Return the site's file for jobs on ``partition``, the default one if None. Raises RequestError."""
    known = [part.name for part in profile.partitions]
    part = profile.partition(partition)
    if part is None and partition is not None:
        hint = did_you_mean(partition, known)
        raise RequestError(f"--partition: unknown partition {partition!r}; {hint}valid: {listing(known)}")
    if not known:
        raise RequestError(f"no partition could be read of the cluster {profile.cluster}: see `toolkit doctor --site`")
    if part is None:
        raise RequestError(f"--partition: this cluster has no default partition; name one of: {listing(known)}")
    account = _association(profile, part)
    head = (
        f"# Defaults of the cluster {profile.cluster}, for every job of yours: a job's own config and arguments win.\n"
        f"# Made by `toolkit site init` from what Slurm {profile.slurm} said on {date.today()}. Edit it as you like."
    )
    return "\n".join([head, "cluster:", *_cluster(profile, part, account), "", *_example(part), ""])


def _association(profile: SiteProfile, part: PartitionRecord) -> AssociationRecord | None:
    """Return the user's account for this partition: the default one, if the partition takes it."""
    usable = [
        record
        for record in profile.associations
        if record.partition in (None, part.name) and (not part.accounts or record.account in part.accounts)
    ]
    usable.sort(key=lambda record: record.account != profile.default_account)
    return usable[0] if usable else None


def _cluster(profile: SiteProfile, part: PartitionRecord, account: AssociationRecord | None) -> Iterator[str]:
    others = [other.name for other in profile.partitions if other is not part]
    yield from _line("partition", part.name, f"others: {listing(others)}" if others else "the only one")
    # Accounts and QOS are named only where Slurm knows them.
    if account is not None:
        yours = [each for each in dict.fromkeys(r.account for r in profile.associations) if each != account.account]
        yield from _line("account", account.account, f"others: {listing(yours)}" if yours else "your only one")
        qos = account.default_qos or (account.qos[0] if len(account.qos) == 1 else None)
        if qos is not None and (not part.qos or qos in part.qos):
            more = [name for name in account.qos if name != qos]
            yield from _line("qos", qos, f"others: {listing(more)}" if more else "your only one")
    else:
        reason = "Slurm lists none for you" if profile.accounting == "on" else f"accounting is {profile.accounting}"
        yield f"  # account, qos: {reason}"
    # The time: the partition's limit, or that of the account.
    limits = [part.time_limit_s, account.time_limit_s if account else None]
    limit_s = min((limit for limit in limits if limit is not None), default=None)
    if limit_s is None:
        yield f"  # time_min: no limit on {part.name}; a job without the key asks for {ClusterConfig().time_min} min"
    else:
        usual_min = math.floor(min(part.default_time_s or limit_s, limit_s) / 60)
        yield from _line("time_min", max(1, usual_min), f"the limit is {in_units(limit_s)}; runs continue after it")
    after = f"a requeued job may start {profile.requeue_delay_s:.0f} s later"
    yield from _line("save_before_limit_s", SIGNAL_DELAY_S, f"a checkpoint is saved so long before the limit; {after}")


def _example(part: PartitionRecord) -> Iterator[str]:
    """Yield, as a comment, a config of a job that takes whole nodes. Sizes belong into the config of each job."""
    memory = f", {part.memory_mb / 1024:.0f} GiB" if part.memory_mb else ""
    gpus = f", {part.gpus} GPUs {part.gpu_type or ''}".rstrip() if part.gpus else ""
    yield f"# A job on whole nodes of {part.name} ({part.cpus} CPUs{memory}{gpus}) has in its own config:"
    ranks = part.gpus or 1
    sizes = {"nodes": 1, "tasks_per_node": ranks, "cpus_per_task": max(1, part.cpus // ranks)}
    if part.gpus:
        sizes["gpus_per_node"] = part.gpus
    yield "#"
    yield "# cluster:"
    yield from (f"#   {key}: {value}" for key, value in sizes.items())
    if part.gpu_type:
        yield f"#   gpu_type: {_text(part.gpu_type)}"


def _line(key: str, value: object, comment: str) -> Iterator[str]:
    yield f"  # {comment}"
    yield f"  {key}: {_text(value)}"


def _text(value: object) -> str:
    """Return a value as YAML writes it: an account 0755 needs quotes."""
    return dump(value).split("\n")[0]


#: A file that begins so may be replaced.
BEGIN = '{\n  "$schema": "http://json-schema.org/draft-07/schema#",\n  "title": "slurm-batch-toolkit '
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
#: What `toolkit.base.durations.parse_minutes` reads.
_TIME = r"^(?=.)([0-9]+ *d)? *([0-9]+ *h)? *([0-9]+ *m(in)?)?$|^[0-9]+(:[0-9]+:[0-9]+)?$|^[0-9]+-[0-9]+(:[0-9]+){0,2}$"
_REFERENCE = {"$ref": "#/definitions/reference"}


def schema_json() -> str:
    """Return the schema as JSON."""
    root = _section(JobConfig, "", asdict(JobConfig()))
    root["properties"] |= {
        "params": {"type": "object", "description": "the keys that the job's own class Params declares"},
        "extends": {
            "type": "string",
            "description": "another config, relative to this one, whose values this one changes",
        },
        "sweep": {"type": "object", "description": "a sweep: values by key, and its own options; see docs/sweeps.md"},
    }
    reference = {"type": "string", "pattern": r"\$\{.+\}", "description": "the value of another key: ${optim.lr}"}
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"slurm-batch-toolkit {__version__}: the config of a run",
        "definitions": {"reference": reference},
    }
    root["description"] = "all keys of a run's config; docs/config.md tells how files and arguments go together"
    return json.dumps(head | root, indent=2, ensure_ascii=False) + "\n"


def modeline(path: Path) -> str:
    """Return the first line of a config whose editor is to use the schema at ``path``."""
    return f"# yaml-language-server: $schema={path}"


def _section(kind: Any, prefix: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    properties = {}
    for name, hint in hints_of(kind).items():
        full = f"{prefix}{name}"
        if is_dataclass(hint):
            properties[name] = _section(hint, f"{full}.", defaults[name])
        else:
            about = comments_of(kind)[name].replace("``", "`")
            takes = _allowed(hint, limits_of(JobConfig)[full])
            if full == "cluster.time_min":
                takes["anyOf"].append({"type": "string", "pattern": _TIME})
            properties[name] = {"description": about, "default": defaults[name], **takes}
    return {
        "type": "object",
        "description": about_of(kind),
        "additionalProperties": False,
        "properties": properties,
    }


def _allowed(hint: Any, limits: tuple[Limit, ...] = ()) -> dict[str, Any]:
    """Return what a value of this type may be. A reference may stand for any scalar."""
    forms: list[dict[str, Any]] = []
    if (listed := container_of(hint, list)) is not None:
        forms.append({"type": "array", "items": _allowed(item_hints(listed, 1)[0])})
    if (mapping := container_of(hint, dict)) is not None:
        forms.append({"type": "object", "additionalProperties": _allowed(get_args(mapping)[1])})
    if kinds := kinds_of(hint):
        scalar: dict[str, Any] = {"type": [_NAMES[kind] for kind in kinds]}
        words = words_of(hint) or next((limit.words for limit in limits if isinstance(limit, OneOf)), ())
        if words:
            scalar["enum"] = [*words, *([None] if NoneType in kinds else [])]
        for limit in limits:
            if isinstance(limit, Range):
                scalar |= {"minimum": limit.least, "maximum": limit.most}
        forms += [scalar] if str in kinds and not words else [scalar, _REFERENCE]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}
