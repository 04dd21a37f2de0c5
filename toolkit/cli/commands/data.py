"""data sets: `toolkit data fetch NAME`, on the login node"""

from argparse import ArgumentParser, Namespace

EXAMPLES = (
    ("toolkit data fetch ResNet50_Weights.IMAGENET1K_V2", "weights that model.init_from can name"),
    ("toolkit data fetch mnist", "download it to $TOOLKIT_DATA, or ./data"),
    ("toolkit data fetch cifar10 --root /shared/data", "to another folder"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("verb", choices=["fetch"])
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--root", help="default: $TOOLKIT_DATA, or ./data")


def run(args: Namespace) -> None:
    from toolkit.data.datasets import fetch

    print(fetch(args.name, args.root))
