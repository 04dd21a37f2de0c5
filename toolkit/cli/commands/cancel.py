"""end a run for good; its checkpoints stay

Checkpoints that are committed stay; what was trained since the last one is
lost. `toolkit stop` commits first.
"""

from argparse import Namespace

from toolkit.cli.commands.stop import add_arguments, ask_to_end

__all__ = ["add_arguments", "run"]

EXAMPLES = (
    ("toolkit cancel digits-ddp", "end the newest run of this name; its checkpoints stay"),
    ("toolkit cancel 20260131-1200", "end the run whose id begins so"),
)


def run(args: Namespace) -> None:
    text = "cancelled; its checkpoints stay, `toolkit resume {run}` goes on from the last one"
    ask_to_end(args.run, "cancel", text)
