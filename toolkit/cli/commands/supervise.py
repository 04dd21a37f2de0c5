"""run the whole lifecycle inside an sbatch or salloc allocation"""

from argparse import Namespace

from toolkit.cli.arguments import add_config as add_arguments

__all__ = ["add_arguments", "run"]

EXAMPLES = (("toolkit supervise configs/digits_ddp.yaml", "inside your own sbatch script or salloc"),)


def run(args: Namespace) -> None:
    from toolkit.run.submission import inside_allocation

    inside_allocation.supervise(args.config, args.overrides)
