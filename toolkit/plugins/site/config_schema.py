"""A JSON schema of the config, for editors: they complete keys and words, show what a key is for, and mark mistakes.

It is of draft 7, which editors know best. What it refuses `toolkit submit` refuses, too, and more: whether keys fit
each other, the job and the site.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from toolkit import __version__
from toolkit.cli.keys import about_of, comments_of
from toolkit.config import JobConfig
from toolkit.limits import Limit, OneOf, Range, container_of, hints_of, item_hints, kinds_of, limits_of, words_of

#: A file that begins so may be replaced.
BEGIN = '{\n  "$schema": "http://json-schema.org/draft-07/schema#",\n  "title": "slurm-batch-toolkit '
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
#: What `toolkit.base.durations.parse_minutes` reads.
_TIME = r"^(?=.)([0-9]+ *d)? *([0-9]+ *h)? *([0-9]+ *m(in)?)?$|^[0-9]+(:[0-9]+:[0-9]+)?$|^[0-9]+-[0-9]+(:[0-9]+){0,2}$"
_REFERENCE = {"$ref": "#/definitions/reference"}


def text() -> str:
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
