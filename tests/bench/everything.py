"""Run the benches, one after the other, at the sizes of the kept results.

    python -m tests.bench.everything [NAME ...] [--keep] [--peers FOLDER]

``--keep`` writes docs/benchmarks/NAME.json, and then the pictures of the pages. ``--peers`` is a folder from
which the benches of shards and of a resume import the loaders of others. At the end it prints how long each one took,
and ends with 1 if one has failed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tests.bench import draw
from tests.bench.record import KEPT

#: Of each kept result: the words after ``python -m tests.``.
COMMANDS: Mapping[str, str] = {
    "loop": "bench.loop",
    "parts": "bench.parts",
    "one_rank": "bench.one_rank",
    "steps": "bench.steps",
    "startup": "bench.startup",
    "restart": "bench.restart",
    "kills": "bench.kills --kills 40",
    "kills-fsdp": "bench.kills --kills 20 --strategy fsdp",
    "kills-node": "bench.kills --kills 8 --what node",
    "goodput": "bench.goodput --minutes 5",
    "live_recovery": "bench.live_recovery --runs 20",
    "checkpoint": "bench.checkpoint",
    "memory": "bench.memory",
    "data": "bench.data",
    "images": "bench.images --images 100 --rounds 3",
    "shards": "bench.shards --mib 512",
    "resume_data": "bench.resume_data",
    "sweep": "bench.sweep",
    "listing": "bench.listing",
    "monitor": "bench.monitor 300",
    "files": "bench.files",
    "beside": "bench.beside",
    "why": "bench.why",
    "collectives": "bench.collectives",
    "links": "bench.links --samples 640",
    "pipeline": "bench.pipeline",
    "strategies": "bench.strategies",
    "strategies-4": "bench.strategies 4",
    "scale": "scale",
    "failures": "bench.failures --ways ours torchrun Lightning NVRx torchft --again ours",
}
#: Those that import loaders of others.
WITH_PEERS = {"images", "shards", "resume_data"}


def run(name: str, more: Sequence[str]) -> tuple[float, bool]:
    """Run one; return its seconds, and whether it has worked."""
    module, *words = COMMANDS[name].split()
    began = time.monotonic()
    print(f"\n== {name}: python -m tests.{COMMANDS[name]}", flush=True)
    done = subprocess.run([sys.executable, "-m", f"tests.{module}", *words, *more])
    return time.monotonic() - began, done.returncode == 0


def main() -> int:
    """Run those that are asked for, and print the seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(COMMANDS)}")
    parser.add_argument("--keep", action="store_true", help="write docs/benchmarks/NAME.json and the pictures")
    parser.add_argument("--peers", metavar="FOLDER")
    args = parser.parse_args()
    if unknown := set(args.names) - COMMANDS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(COMMANDS)}")
    took = {}
    for name in args.names or COMMANDS:
        more = ["--json", str(KEPT / f"{name}.json")] if args.keep else []
        more += ["--peers", args.peers] if args.peers and name in WITH_PEERS else []
        took[name] = run(name, more)
        # After each bench, so that a run that is broken off leaves pages that agree with the files.
        if args.keep:
            draw.main()
    print("\nseconds of each bench")
    for name, (seconds, is_right) in took.items():
        print(f"{name:16}{seconds:7.0f}{'' if is_right else '  failed'}")
    print(f"{'all':16}{sum(seconds for seconds, _ in took.values()):7.0f}")
    return int(not all(is_right for _, is_right in took.values()))


if __name__ == "__main__":
    sys.exit(main())
