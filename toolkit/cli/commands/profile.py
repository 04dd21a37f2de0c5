"""record some steps of a rank: a trace for Perfetto, its memory"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import on_demand
from toolkit.files.rundir import RunDir
from toolkit.run.records.stop_request import Answer

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
    on_demand.add_wait_s(parser)


def run(args: Namespace) -> None:
    import time

    from toolkit.base.errors import RequestError
    from toolkit.files import rundir
    from toolkit.run.records.stop_request import UserRequest, Wish

    of = rundir.find(args.run)
    if not 1 <= args.steps <= MAX_STEPS:
        raise RequestError(f"profile: --steps {args.steps}: from 1 to {MAX_STEPS}, or the trace gets too long")
    on_demand.refuse_unless_running(of)
    on_demand.refuse_other_rank(of, args.rank)
    wanted = UserRequest(Wish.PROFILE, time.time(), rank=args.rank, steps=args.steps, memory=args.memory)
    print(profile_page(of, args.rank, on_demand.carry_out(of, wanted, args.wait_s)))


def profile_page(run: RunDir, rank: int, answer: Answer) -> str:
    """Return where the files of a profile are, and what shows them."""
    first, count = answer.step or 0, answer.steps or 0
    steps = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
    tools = {".gz": "https://ui.perfetto.dev, or chrome://tracing", ".pickle": "https://pytorch.org/memory_viz"}
    lines = [f"run {run.id}, rank {rank}, {steps}:"]
    for file in answer.files:
        tool = tools.get(file[file.rindex(".") :])
        lines.append(f"  {file}{f' (open it in {tool})' if tool else ''}")
    return "\n".join(lines)
