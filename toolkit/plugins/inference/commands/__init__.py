"""The commands about trained models."""

from __future__ import annotations

from argparse import ArgumentParser

from toolkit.cli import arguments


def add_checkpoint(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="newest", metavar="STEP|best|newest", help="default: newest")
    arguments.add_weights(parser)
