"""run as one rank, under srun, torchrun, mpirun or alone"""

from argparse import Namespace

from toolkit.cli.arguments import add_config as add_arguments

__all__ = ["add_arguments", "run"]

EXAMPLES = (("toolkit run configs/digits_ddp.yaml train.epochs=1", "one rank, alone in this process"),)


def run(args: Namespace) -> int:
    from toolkit.run.rank.main import run_rank

    return run_rank(args.config, args.overrides)
