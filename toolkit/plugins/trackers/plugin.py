"""`toolkit sync` and `trackers:`, copies of runs' metrics in trackers of experiments; and TensorBoard."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "trackers",
    commands={
        "sync": "toolkit.plugins.trackers.command",
        "tensorboard": "toolkit.plugins.trackers.tensorboard_command",
    },
    hooks={"beside_run": "toolkit.plugins.trackers.beside_run:Senders"},
    trackers={
        "mlflow": "toolkit.plugins.trackers.mlflow:Mlflow",
        "trackio": "toolkit.plugins.trackers.trackio:Trackio",
        "wandb": "toolkit.plugins.trackers.wandb:Wandb",
    },
)
