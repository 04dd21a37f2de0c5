"""Print how each mechanism grows with the size of a run.

    python -m tests.scale [NAME ...] [--small]

``NAME`` is the beginning of a curve's name. ``--small`` measures the smallest size of each curve only.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tests.scale import curves, measured, table


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    chosen = [c for c in curves() if not args.names or c.name.startswith(tuple(args.names))]
    if not chosen:
        sys.exit(f"no such curve; there are: {', '.join(curve.name for curve in curves())}")
    logging.disable()  # what nodes that do not exist are warned of
    for curve in chosen:
        sizes = curve.sizes[:1] if args.small else curve.sizes
        print(table(curve, [measured(curve, size) for size in sizes]), flush=True)


if __name__ == "__main__":
    main()
