"""How the layers of a configuration merge.

Later layers win: the defaults of schema.py, some variables of sbatch, the site's defaults (``$TOOLKIT_SITE`` or
``~/.config/toolkit/site.yaml``), the file that ``extends:`` names, the file itself, ``key=value`` arguments. Files and
arguments are YAML 1.2, see yaml_core.py. A value may refer to others: ``${optim.lr}``, as OmegaConf reads it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yaml import MappingNode, Node

from toolkit.base.errors import ConfigError
from toolkit.config import yaml_core
from toolkit.config.declared import dataclass_in, defaults_of
from toolkit.config.hints import PLAIN
from toolkit.config.job_module import job_source, params_source
from toolkit.config.layer_files import Layer, Overrides, file_layers, override_layer, override_texts, site_layers
from toolkit.config.layer_values import read_mapping, read_section
from toolkit.config.references import MISSING, References, build, escaped, final_value, resolved
from toolkit.config.schema import FOREIGN_JOB, JobConfig
from toolkit.config.script_arguments import named
from toolkit.config.source import read_source

#: Variables in which a user's profile holds options of sbatch, by the keys of ``cluster``. sbatch itself does not get
#: them: it would prefer them to the options in the script, which are those of the config.
SBATCH_VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}


def load_config(
    path: str | Path | None,
    overrides: Overrides = (),
    *,
    site: bool = True,
    project: Path | None = None,
    sweep: bool = False,
) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    The path of a script (``train.py``) stands for a config without keys that has the script as its ``job``. Without a
    path the layers are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and YAML values,
    or a mapping of dotted keys to values. Keys, types and values are checked; :func:`validate` checks whether the
    config fits a machine. Raises ConfigError.

    ``params`` are checked against the class ``Params`` of the job's file, or of the file whose class it derives from.
    The job is looked for in ``project``, the current folder if None. With ``site=False`` and no ``project`` they are
    not checked: those of a run already were.
    A file with the section ``sweep`` is refused, without ``sweep=True``::

        >>> toolkit.load_config("configs/digits_ddp.yaml", ["optim.lr=0.1"]).optim.lr
        0.1
    """
    merged, own = merged_layers(path, overrides, site=site, project=project, sweep=sweep)
    references = References(merged)
    if own is None:
        params = resolved(merged["params"], PLAIN, references, ("params",))
    else:
        params = asdict(build(own, merged["params"], references, ("params",)))
    config: JobConfig = build(JobConfig, {**merged, "params": {}}, references)
    config.params = params
    return config


def merged_layers(
    path: str | Path | None,
    overrides: Overrides = (),
    *,
    site: bool = True,
    project: Path | None = None,
    sweep: bool = False,
) -> tuple[dict[str, Any], type | None]:
    """Return the merged values of all layers, references unresolved, and the job's ``Params``.

    See :func:`load_config`.
    """
    is_script = path is not None and Path(path).suffix == ".py"
    layers = site_layers(site)
    merged: dict[str, Any] = asdict(JobConfig())
    if site:
        variables = {key: os.environ.get(name) for key, name in SBATCH_VARIABLES.items()}
        merged["cluster"] |= escaped({key: value for key, value in variables.items() if value})
    if path is not None:
        merged["name"] = Path(path).stem
    if is_script:
        merged["job"] = str(path)
    elif path is not None:
        layers += file_layers(Path(path), ())
    described = next((layer for layer in layers if layer.sweep is not None), None)
    if described is not None and not sweep:
        raise ConfigError(f"{described.name}: sweep: describes many runs; `toolkit sweep {path}` submits them")
    layers += map(override_layer, override_texts(overrides))
    # ``params`` are merged later: only the job, which any layer may name, knows which keys they have.
    given = [(layer, pair[1]) for layer in layers if (pair := layer.pairs(layer.root).get("params"))]
    for layer in layers:
        values = read_section(layer, layer.root, JobConfig)
        if "argv" in values:  # a later layer wins, whichever way it gives an option
            merged["args"] = {
                name: value for name, value in merged["args"].items() if name not in named(values["argv"])
            }
        _merge(merged, values)
    # The params of a run were checked when it was submitted, and its job's file may have changed since.
    if not site and project is None:
        for layer, node in given:
            _merge(merged["params"], read_mapping(layer, node, "params"))
        return merged, None
    job = final_value(merged["job"], str, References(merged), ("job",))
    own = _own_keys(str(job), project, given)
    if own is not None:
        merged["params"] = escaped(defaults_of(own, MISSING))
        for layer, node in given:
            _merge(merged["params"], read_section(layer, node, own, "params."))
    return merged, own


def _own_keys(job: str, project: Path | None, given: Sequence[tuple[Layer, Node]]) -> type | None:
    """Return the job's ``Params``. None where the job cannot be found or read: :func:`validate` reports that."""
    try:
        source = None if job == FOREIGN_JOB else params_source(read_source(job_source(job, project)), project)
    except (ConfigError, OSError):
        # Given params cannot be checked without the file, so the error must be raised now.
        if given:
            raise
        return None
    own = None if source is None else dataclass_in(source, "Params")
    for layer, node in given:
        if own is None and not (isinstance(node, MappingNode) and not node.value):
            if source is None:
                why = "a script that knows nothing of the toolkit has none; give it arguments: args.NAME=VALUE"
            else:
                how = "`@dataclass` and `class Params:` with `width: int = 256` below it"
                if "Params" in source.classes:
                    place = source.place(source.classes["Params"])
                    why = f"class Params ({place}) is no dataclass; write `@dataclass` from dataclasses before it"
                elif source.imports("Params"):
                    why = f"{source.path} imports Params, and its keys must be known without importing it: "
                    why += f"write {how} there"
                else:
                    why = f"{source.path} declares no keys of its own; write {how} there, or take them out here"
            raise layer.error(node, f"params: {why}")
    return own


def dump_config(config: JobConfig) -> str:
    """Return the config as YAML that :func:`load_config` reads back to an equal one."""
    return yaml_core.dump(escaped(asdict(config)))


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value
