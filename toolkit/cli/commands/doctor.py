"""read the site, check nodes as each job does, or try the site out"""

from argparse import ArgumentParser, Namespace
from typing import Any

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, RequestError
from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit doctor --site", "what the cluster allows, and the versions here; no job"),
    ("toolkit doctor --prove", "try the site out by a short run on two nodes"),
    ("toolkit doctor", "check this machine, or all nodes of this allocation"),
    ("toolkit doctor --nodes 4 cluster.partition=gpu", "ask Slurm for four nodes and check them"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "toolkit doctor [--site | --prove] [--nodes N] [CONFIG] [key=value]"
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG] [key=value]", help="such as cluster.partition=gpu")
    parser.add_argument("--nodes", type=int, help="default: those of this allocation, or cluster.nodes; 2 with --prove")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--site", action="store_true", help="read the site and write its profile; ask for no nodes")
    what.add_argument("--prove", action="store_true", help="try the site out by a short run, for a minute or more")
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit import config as configs
    from toolkit.base import logs, terminal
    from toolkit.cli import show
    from toolkit.files import rundir
    from toolkit.plugins.site import doctor, node_history, site_limits
    from toolkit.plugins.site.doctor import versions

    files = [word for word in args.overrides if "=" not in word]
    if len(files) > 1 or (args.nodes is not None and args.nodes < 1):
        raise RequestError("toolkit doctor: one CONFIG at most, then key=value; --nodes takes 1 or more")
    logs.setup()
    config = configs.load_config(files[0] if files else None, [word for word in args.overrides if "=" in word])
    # The cluster's part alone is used. The job is never started, and the script of --prove has no params.
    config.job, config.params = configs.FOREIGN_JOB, {}
    configs.validate(config)
    profile, about_profile = doctor.read_site_here()
    if args.prove:
        profile, about_profile = doctor.prove_site(config, args.nodes, profile, about_profile)
    answer: dict[str, Any] = {
        "site": None if profile is None else profile.to_json(),
        "site_profile": about_profile,
        "versions": versions(),
    }
    page, is_fine = _site_page(profile, about_profile, tables.width(args)), True
    answer["reservations"] = held = [*filter(None, map(site_limits.holding_back, config.cluster.parts))]
    page += ["", *held] if held else []
    if args.prove and profile is not None:
        is_fine = all(proof.is_proven is not False for proof in profile.proofs)
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
        print(show.as_json(answer))
    else:
        for part in page:
            part.print() if isinstance(part, tables.Table) else terminal.say(part)
    return EXIT_DONE if is_fine else EXIT_FAILED


def _site_page(profile: Any, about_profile: str, width: int | None) -> list[str | tables.Table]:
    """Return the lines about the site, and about this environment."""
    from toolkit.plugins.site import doctor, site_profile
    from toolkit.plugins.site.doctor import versions

    here = ", ".join(f"{name} {version}" for name, version in versions().items())
    # Without a profile, as on a machine without Slurm, only the environment is known.
    if profile is None:
        return [about_profile, here]
    date = site_profile.date(profile.made)
    head = f"cluster {profile.cluster}, Slurm {profile.slurm}, as {profile.user} sees it on {date}"
    table = tables.Table(doctor.partition_rows(profile), width, ("PREEMPTION",))
    proofs = [*doctor.proof_lines(profile)]
    if proofs and profile.proven:
        proofs = ["", f"proven by a job on {site_profile.date(profile.proven)}:", *proofs]
    return [head, "", table, "", *doctor.lines(profile), "", here, *proofs, "", about_profile]
