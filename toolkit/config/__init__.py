"""The configuration of a run: its keys, how layers merge, and what is refused.

See schema, layers and validation. No module here imports torch or the job: a config is checked on the login node in
well under a second.
"""

from toolkit.config.cluster import ClusterConfig
from toolkit.config.job_module import is_loop, is_plain, job_source, uses_toolkit_steps
from toolkit.config.layers import Overrides, dump_config, load_config, merged_layers, override_texts
from toolkit.config.optim import OptimConfig
from toolkit.config.params import filled, leaves
from toolkit.config.schema import (
    CALLED_JOB,
    FIXED_ON_RESUME,
    SCRIPT_JOB,
    CheckpointConfig,
    DataConfig,
    DistConfig,
    ImageConfig,
    JobConfig,
    ModelConfig,
    PruningConfig,
    TrainConfig,
    all_keys,
    put,
    value_of,
)
from toolkit.config.script_arguments import argv_override, command_line
from toolkit.config.strategy import MeshConfig, StrategyConfig, mesh_of
from toolkit.config.validation import (
    check_batch,
    check_change,
    check_places,
    check_section,
    check_step,
    check_torch,
    may_resume_with,
    validate,
)
from toolkit.constraints import choose, is_one_line

__all__ = [
    "CALLED_JOB",
    "FIXED_ON_RESUME",
    "SCRIPT_JOB",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DistConfig",
    "ImageConfig",
    "JobConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "Overrides",
    "PruningConfig",
    "StrategyConfig",
    "TrainConfig",
    "all_keys",
    "argv_override",
    "check_batch",
    "check_change",
    "check_places",
    "check_section",
    "check_step",
    "check_torch",
    "choose",
    "command_line",
    "dump_config",
    "filled",
    "is_loop",
    "is_one_line",
    "is_plain",
    "job_source",
    "leaves",
    "load_config",
    "may_resume_with",
    "merged_layers",
    "mesh_of",
    "override_texts",
    "put",
    "uses_toolkit_steps",
    "validate",
    "value_of",
]
