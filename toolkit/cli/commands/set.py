"""give a run other values, from a step on that its ranks agree on"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import on_demand

EXAMPLES = (
    ("toolkit set mnist optim.lr=0.01", "another peak of the learning rate's schedule"),
    ("toolkit set mnist train.log_every=5 checkpoint.every_steps=50", "other intervals"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=0.01")
    on_demand.add_wait_s(parser)


def run(args: Namespace) -> None:
    import time

    from toolkit.files import rundir
    from toolkit.run.prepare.live_values import checked, text
    from toolkit.run.records.stop_request import UserRequest, Wish

    of = rundir.find(args.run)
    on_demand.refuse_unless_running(of)
    values = checked(of, args.overrides)
    answer = on_demand.carry_out(of, UserRequest(Wish.SET, time.time(), values=values), args.wait_s)
    print(f"run {of.id}: {text(values)} from step {answer.step} on")
