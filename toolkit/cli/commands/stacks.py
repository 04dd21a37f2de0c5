"""show what the ranks of a run do now: their Python stacks"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments

EXAMPLES = (("toolkit stacks gpt", "what all ranks do now"), ("toolkit stacks gpt --rank 3", "one rank"))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", type=int, help="default: all ranks")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", dest="wait_s", help="default: 60")
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    import time

    from toolkit.cli import on_demand
    from toolkit.files import rundir
    from toolkit.run.records.user_requests import RequestKind, UserRequest

    of = rundir.find(args.run)
    answer = on_demand.carry_out(of, UserRequest(RequestKind.STACKS, time.time()), args.wait_s, args.rank)
    if args.rank is not None:
        answer = answer.replace(groups=tuple(group for group in answer.groups if args.rank in group.ranks))
    print(arguments.as_json(answer.to_json()) if args.json else on_demand.stacks_page(of, answer))
