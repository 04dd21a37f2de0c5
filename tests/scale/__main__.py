"""Print how each mechanism grows with the size of a run.

    python -m tests.scale [NAME ...] [--small]

``NAME`` is the beginning of a curve's name. ``--small`` measures the smallest size of each curve only.
"""

import argparse
import logging
import sys
from typing import Any

from tests.bench import record
from tests.scale import curves, measured, rows, table


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--small", action="store_true")
    record.add_option(parser)
    args = parser.parse_args()
    chosen = [c for c in curves() if not args.names or c.name.startswith(tuple(args.names))]
    if not chosen:
        sys.exit(f"no such curve; there are: {', '.join(curve.name for curve in curves())}")
    logging.disable()  # what nodes that do not exist are warned of
    found = list[dict[str, Any]]()
    for curve in chosen:
        points = [measured(curve, size) for size in (curve.sizes[:1] if args.small else curve.sizes)]
        print(table(curve, points), flush=True)
        found += rows(curve, points)
    record.write(args.json, found)


if __name__ == "__main__":
    main()
