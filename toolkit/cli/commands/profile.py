"""record some steps of a rank: a trace for Perfetto, its memory"""

from argparse import ArgumentParser, Namespace

#: Or the trace gets too long.
MAX_STEPS = 100
EXAMPLES = (
    ("toolkit profile mnist", "three steps of rank 0 of the newest run of mnist"),
    ("toolkit profile mnist --rank 3 --steps 5 --memory", "and what is allocated"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument("--steps", type=int, default=3, help="default: 3")
    parser.add_argument("--memory", action="store_true", help="also what is allocated and freed, and by what")
    text = "withdraw the request where the ranks have not answered after this time; default: 600"
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", dest="wait_s", help=text)


def run(args: Namespace) -> None:
    import time

    from toolkit.base.errors import RequestError
    from toolkit.cli import on_demand
    from toolkit.files import rundir
    from toolkit.run.records.user_requests import RequestKind, UserRequest

    of = rundir.find(args.run)
    if not 1 <= args.steps <= MAX_STEPS:
        raise RequestError(f"profile: --steps {args.steps}: from 1 to {MAX_STEPS}, or the trace gets too long")
    wanted = UserRequest(RequestKind.PROFILE, time.time(), rank=args.rank, steps=args.steps, memory=args.memory)
    answer = on_demand.carry_out(of, wanted, args.wait_s, args.rank)
    first, count = answer.step or 0, answer.steps or 0
    print(f"run {of.id}, rank {args.rank}, step{'' if count == 1 else f's {first} to'} {first + count - 1}:")
    tools = {".gz": "https://ui.perfetto.dev, or chrome://tracing", ".pickle": "https://pytorch.org/memory_viz"}
    for file in answer.files:
        tool = tools.get(file[file.rindex(".") :])
        print(f"  {file}{f' (open it in {tool})' if tool else ''}")
