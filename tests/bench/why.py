"""How often `toolkit why` names the right cause of a log.

It also counts how often `toolkit why` says that it does not know.

    python -m tests.bench.why [--table]

With ``--table`` it prints the table that `make docs` puts into docs/why-causes.md instead.
"""

import argparse
import time
from itertools import groupby

from tests import gold
from tests.bench import record
from toolkit.plugins.report.why.diagnosis import all_rules

#: The headings of the page, by the first part of a rule's name.
SUBJECTS = {
    "ckpt": "Checkpoints",
    "cuda": "CUDA",
    "fs": "File systems",
    "gpu": "GPUs and drivers",
    "hf": "Hugging Face",
    "host": "Machines",
    "mpi": "MPI",
    "nccl": "NCCL",
    "net": "Network",
    "numeric": "Numbers",
    "peer": "Other ranks",
    "py": "Python and torch",
    "run": "The run",
    "shell": "The batch script",
    "signal": "Signals",
    "slurm": "Slurm",
}


def table() -> str:
    """Return all rules as the tables of the page that lists them, one for each subject."""
    parts = []
    for subject, rules in groupby(all_rules(), lambda rule: rule.id.partition(".")[0]):
        rows = [f"| `{rule.id}` | {rule.cause} | {rule.next} |" for rule in rules]
        head = ["| rule | what it means | what to do |", "|---|---|---|"]
        parts.append("\n".join([f"## {SUBJECTS[subject]}", "", *head, *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Print accuracy, coverage and every confusion of both parts of the gold set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    record.add_option(parser)
    args = parser.parse_args()
    rows = []
    if args.table:
        print(table())
        return
    print(f"{len(all_rules())} rules")
    for part in gold.PARTS:
        cases = gold.read(part)
        start = time.perf_counter()
        score = gold.score(cases)
        each_ms = 1000 * (time.perf_counter() - start) / len(cases)
        # Some tails are of our own making, and no thread.
        threads = len({case.source for case in cases} - {"ours"})
        print(f"{part}: {score.cases} log tails of {threads} public threads, {each_ms:.1f} ms each")
        rows.append(record.row(f"{part}: right where it names a cause", [100 * score.accuracy], "%", better="more"))
        rows.append(record.row(f"{part}: names one where there is one", [100 * score.coverage], "%", better="more"))
        print(f"  right where it names a cause: {score.right} of {score.spoken} ({score.accuracy:.1%})")
        print(f"  names one where there is one: {score.coverage:.1%} of {score.with_cause}")
        for (label, said), count in score.confusion.most_common():
            print(f"  {count} x {label}: {'not known' if said == gold.SILENT else said}")
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
