"""fetch a data set, or make token shards of texts"""

from argparse import ArgumentParser, Namespace

from toolkit import registry

EXAMPLES = (
    ("toolkit data fetch ResNet50_Weights.IMAGENET1K_V2", "weights that model.init_from can name"),
    ("toolkit data fetch mnist", "download it to $TOOLKIT_DATA, or ./data"),
    ("toolkit data fetch cifar10 --root /shared/data", "to another folder"),
    ("toolkit data tokenize books/ --tokenizer tokenizer.json --out tokens", "texts as tokens; goes on after a kill"),
)
#: Named and not imported: it needs torch, and an unknown name is refused without.
_FETCH_WEIGHTS = "toolkit.plugins.formats.images.downloads:fetch_weights"


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "toolkit data fetch NAME [--root DIR]"
    parser.add_argument("verb", choices=["fetch", "tokenize"])
    parser.add_argument("names", nargs="+", metavar="NAME|IN", help="a data set; tokenize: texts, .jsonl, folders")
    parser.add_argument("--root", help="fetch: default $TOOLKIT_DATA, or ./data")
    from toolkit.plugins.formats.tokens import tokenize

    tokenize.add_arguments(parser)


def run(args: Namespace) -> None:
    from toolkit.base.errors import RequestError
    from toolkit.config import catalog
    from toolkit.files import origin

    if args.verb == "tokenize":
        from toolkit.plugins.formats.tokens import tokenize

        tokenize.run(args)
        return
    # The parser takes several names for tokenize; fetch takes one.
    name, *more = args.names
    if more:
        raise RequestError(f"toolkit data fetch {name}: {more[0]!r} is one word too many")
    if not origin.is_published(name):
        fetch = catalog.entry_of(name).fetch
        if fetch is None:
            print(f"{name} needs no files: there is nothing to fetch")
        else:
            print(registry.part_of("datasets", name, fetch)(name, args.root))
    else:
        print(registry.part_of("datasets", name, _FETCH_WEIGHTS)(name, args.root))
