"""commit a checkpoint and end; `resume` continues

All ranks agree on a step, commit it and end. The job is not requeued. A job
that waits in the queue is cancelled: it has nothing to save.
"""

from argparse import ArgumentParser, Namespace

EXAMPLES = (("toolkit stop gpt", "commit a checkpoint and end; `toolkit resume gpt` continues it"),)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")


def run(args: Namespace) -> None:
    ask_to_end(args.run, "stop", "asked to commit a checkpoint and end")


def ask_to_end(name: str, how: str, text: str, **options: bool) -> None:
    """Ask a run to ``stop`` or ``cancel``, and print ``text``, or that it has ended or was asked before."""
    from toolkit.base.terminal import say
    from toolkit.files import rundir
    from toolkit.run.attempt import advice
    from toolkit.run.records import user_requests
    from toolkit.run.submission.handle import attach

    run = rundir.find(name)
    result = run.result()
    if result is not None:
        say(f"run {run.id} has already ended: {result.state}")
        return
    # Asking again is harmless, but the answer should say so.
    before = user_requests.read_intent(run)
    getattr(attach(run), how)(**options)
    if before in (how, user_requests.Intent.CANCEL):
        text = f"{before} was asked for before; asking again changes nothing"
    say(f"run {run.id}: {text}; {advice.after_request(run, how)}")
