"""read the site, check nodes as each job does, or try the site out"""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, RequestError
from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit doctor --site", "what the cluster allows, and the versions here; no job"),
    ("toolkit doctor --prove", "try the site out by a short run on two nodes"),
    ("toolkit doctor --prove --gpus", "show by several runs what the GPUs do; writes a page to send"),
    ("toolkit doctor", "check this machine, or all nodes of this allocation"),
    ("toolkit doctor --nodes 4 cluster.partition=gpu", "ask Slurm for four nodes and check them"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "toolkit doctor [--site|--prove [--gpus]] [--nodes N] [CONFIG] [key=value]"
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG] [key=value]", help="such as cluster.partition=gpu")
    parser.add_argument("--nodes", type=int, help="default: those of this allocation, or cluster.nodes; 2 with --prove")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--site", action="store_true", help="only read the site; ask for no nodes")
    what.add_argument("--prove", action="store_true", help="try the site out by a short run, for a minute or more")
    parser.add_argument("--gpus", action="store_true", help="with --prove: what GPUs do; gpu-evidence.json and .html")
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit import config as configs
    from toolkit.base import logs, terminal
    from toolkit.files import rundir
    from toolkit.plugins.site import doctor, node_history, reservations

    files = [word for word in args.overrides if "=" not in word]
    if len(files) > 1 or (args.nodes is not None and args.nodes < 1):
        raise RequestError("toolkit doctor: takes one CONFIG at most, then key=value; --nodes must be 1 or more")
    if args.gpus and not args.prove:
        raise RequestError("toolkit doctor: --gpus goes with --prove")
    logs.setup()
    config = configs.load_config(files[0] if files else None, [word for word in args.overrides if "=" in word])
    # The cluster's part alone is used. The job is never started, and the script of --prove has no params.
    config.job, config.params = configs.SCRIPT_JOB, {}
    configs.validate(config)
    profile, why_none = doctor.read_site_here()
    answer: dict[str, Any] = {
        "site": None if profile is None else asdict(profile),
        "why_no_site": why_none or None,
        "versions": doctor.versions(),
    }
    page: list[str | tables.Table] = [", ".join(f"{name} {version}" for name, version in answer["versions"].items())]
    # Without a profile, as on a machine without Slurm, only the environment is known.
    if profile is None:
        page = [why_none, *page]
    else:
        head = f"cluster {profile.cluster}, Slurm {profile.slurm}, as {profile.user} sees it"
        table = tables.Table(doctor.partition_rows(profile), tables.width(args), ("PREEMPTION",))
        page = [head, "", table, "", *doctor.lines(profile), "", *page]
    answer["reservations"] = held = [*filter(None, map(reservations.holding_back, config.cluster.component_requests))]
    page += ["", *held] if held else []
    is_fine = True
    if args.prove:
        if args.gpus:
            proofs = doctor.prove_gpus(config, args.nodes)
        else:
            proofs = doctor.prove_site(config, args.nodes, profile, why_none)
        answer["proofs"] = [asdict(proof) for proof in proofs]
        page += ["", *doctor.proof_lines(proofs)]
        is_fine = all(proof.is_proven is not False for proof in proofs)
    elif not args.site:
        report = doctor.examine(config, args.nodes)
        answer |= doctor.as_dict(report)
        rows = doctor.rows(report)
        # The table is for several nodes; what is wrong follows in sentences.
        page += ["", tables.Table(rows, tables.width(args)), ""] if len(rows) > 1 else [""]
        page += report.summary()
        answer["doubtful_nodes"] = doubtful = node_history.doubtful(rundir.runs_root())
        page += [f"{host} {text}" for host, text in doubtful.items()]
        is_fine = report.is_fine
    if args.json:
        print(arguments.as_json(answer))
    else:
        for part in page:
            part.print() if isinstance(part, tables.Table) else terminal.say(part)
    return EXIT_DONE if is_fine else EXIT_FAILED
