"""submit a run to Slurm, or start it on this machine

The config, or the script, is checked in full first. Where sbatch answers the
run goes to Slurm, else to this machine. The sources are copied into the run
folder.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit submit configs/digits_ddp.yaml --follow", "submit and watch it to its end"),
    ("toolkit submit configs/digits_ddp.yaml optim.lr=0.1 cluster.nodes=4", "with other values"),
    ("toolkit submit train.py cluster.nodes=2 -- --epochs 90", "a script, with arguments of its own"),
    ("toolkit submit configs/digits_ddp.yaml --dry-run", "print the sbatch script and the config, submit nothing"),
    ("toolkit submit configs/finetune.yaml --after gpt-fsdp", "start when the newest run of that name has completed"),
)


def add_arguments(parser: ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local, debug (one rank, right here)")
    arguments.add_dry_run(parser)
    arguments.add_after(parser)
    arguments.add_wait(parser)


def run(args: Namespace) -> int | None:
    from toolkit.run.submission import submit

    if args.dry_run:
        print(submit.dry_run(args.config, args.overrides, executor=args.executor, after=args.after))
        return None
    from toolkit.cli import follow

    sent = submit.submit(args.config, args.overrides, executor=args.executor, after=args.after)
    return follow.announce_and_wait(sent, args)
