"""The config of a run that is there already, as far as its file can be read.

As text, for reports and trackers, it is without the values that may be secret: others may read these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, yaml_core
from toolkit.files.rundir import RunDir

#: ``tokens``, ``tokenizer`` and the like are a model's.
_SECRET = re.compile(
    r"(?i)passw|secret|token(?!s|i[sz])|credential|api_?key|private_?key|(^|\.)(setup|notify|env|environment)(\.|$)"
)
_EMPTY = ("", "[]", "{}", "null")

log = logs.get(__name__)


def values_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values in the config ``path`` by dotted key, and those among them that may be secret.

    In the first these are "(not shown)"; the second is only for comparisons. A file that cannot be read has none, with
    a warning.
    """
    try:
        node = yaml_core.compose(fsio.read_text(path, errors="replace"))
        values = {} if node is None else dict(_pairs(node, ""))
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read: %s", path, " ".join(str(error).split())[:200])
        return {}, {}
    hidden = {key: value for key, value in values.items() if _SECRET.search(key) and value not in _EMPTY}
    return values | dict.fromkeys(hidden, "(not shown)"), hidden


def _pairs(node: Node, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys below ``node`` and their values as text."""
    if isinstance(node, MappingNode) and node.value:
        for name, value in node.value:
            yield from _pairs(value, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, ScalarNode):
        yield key, str(node.value)
    elif isinstance(node, SequenceNode):
        yield key, f"[{', '.join(_inline(item) for item in node.value)}]"
    else:
        yield key, "{}"


def _inline(node: Node) -> str:
    """Return an item of a list as text."""
    pairs = dict(_pairs(node, ""))
    return json.dumps(pairs) if isinstance(node, MappingNode) else next(iter(pairs.values()))


def read(run: RunDir) -> JobConfig | None:
    """Return the config, or None for a damaged file."""
    try:
        return configs.load_config(run.config, site=False)
    except ConfigError:
        return None


def is_script(run: RunDir) -> bool:
    """True for a run of `toolkit exec`: it prints for its reader, and has checkpoints of its own."""
    config = read(run)
    return config is not None and config.job == configs.SCRIPT_JOB
