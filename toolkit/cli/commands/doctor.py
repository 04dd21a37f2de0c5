"""check nodes as every job does before its ranks start"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments
from toolkit.errors import EXIT_DONE, EXIT_FAILED, RequestError

EXAMPLES = (
    ("toolkit doctor", "check this machine, or all nodes of this allocation"),
    ("toolkit doctor --nodes 4 cluster.partition=gpu", "ask Slurm for four nodes and check them"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "toolkit doctor [--nodes N] [--json] [CONFIG] [key=value ...]"
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG] [key=value]", help="such as cluster.partition=gpu")
    parser.add_argument("--nodes", type=int, help="default: those of this allocation, or cluster.nodes")
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit import config as configs
    from toolkit import logs
    from toolkit.cli import show
    from toolkit.diagnose import doctor

    files = [word for word in args.overrides if "=" not in word]
    if len(files) > 1 or (args.nodes is not None and args.nodes < 1):
        raise RequestError("toolkit doctor: one CONFIG at most, then key=value; --nodes takes 1 or more")
    logs.setup()
    config = configs.load_config(files[0] if files else None, [word for word in args.overrides if "=" in word])
    config.job = configs.FOREIGN_JOB  # a job that is never started: only the cluster's part is used
    configs.validate(config)
    report = doctor.examine(config, args.nodes)
    rows = doctor.rows(report)
    # The table is for several nodes; what is wrong follows in sentences.
    head = [show.table(rows), ""] if len(rows) > 1 else []
    page = "\n".join([*head, *report.summary(), *doctor.about_requeue()])
    print(show.as_json(doctor.as_dict(report)) if args.json else page)
    return EXIT_DONE if report.is_fine else EXIT_FAILED
