"""fetch a data set, or make token shards of texts"""

from argparse import ArgumentParser, Namespace

from toolkit import registry
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit data fetch ResNet50_Weights.IMAGENET1K_V2", "weights that model.init_from can name"),
    ("toolkit data fetch mnist", "download it to $TOOLKIT_DATA, or ./data"),
    ("toolkit data fetch cifar10 --root /shared/data", "to another folder"),
    ("toolkit data tokenize books/ --tokenizer tokenizer.json --out tokens", "texts as tokens; continues after a kill"),
)
#: Named and not imported: it needs torchvision, and an unknown name is refused without.
_FETCH_WEIGHTS = "toolkit.plugins.formats.images.small:fetch_weights"


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "toolkit data fetch NAME [--root DIR]\n"
        "       toolkit data tokenize IN [IN ...] --out DIR [--tokenizer FILE]\n"
        "                [--end TOKEN] [--field NAME] [--shard-tokens N] [--json]"
    )
    parser.add_argument("verb", choices=["fetch", "tokenize"])
    parser.add_argument("names", nargs="+", metavar="NAME|IN", help="a data set; tokenize: texts, .jsonl, folders")
    parser.add_argument("--root", help="fetch: default $TOOLKIT_DATA, or ./data")
    parser.add_argument("--out", metavar="DIR", help="tokenize: the folder of the token shards")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenize: a tokenizer.json; default: each byte is a token")
    parser.add_argument("--end", metavar="TOKEN", help="tokenize: ends a document; default such as </s>")
    parser.add_argument("--field", default="text", metavar="NAME", help="tokenize: the text in a .jsonl; default text")
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokenize: of a file; default 100 million"
    )
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    if args.verb == "tokenize":
        _tokenize(args)
    else:
        _fetch(args)


def _fetch(args: Namespace) -> None:
    from toolkit.base.errors import RequestError
    from toolkit.config import dataset_catalog
    from toolkit.files import origin

    # The parser takes several names for tokenize; fetch takes one.
    name, *more = args.names
    if more:
        raise RequestError(f"toolkit data fetch {name}: unexpected argument {more[0]!r}; leave it out")
    fetch = _FETCH_WEIGHTS if origin.is_published(name) else dataset_catalog.entry_of(name).fetch
    if fetch is None:
        print(f"{name} needs no files: there is nothing to fetch")
    else:
        print(registry.load_part("datasets", name, fetch)(name, args.root))


def _tokenize(args: Namespace) -> None:
    from toolkit.base import fsio, logs, terminal
    from toolkit.base.errors import RequestError
    from toolkit.plugins.formats.tokens.writer import Encoder, tokenize

    if args.out is None:
        raise RequestError("toolkit data tokenize: --out is missing; give the folder to write to")
    if args.shard_tokens < 1:
        raise RequestError("--shard-tokens: is out of range; must be 1 or more")
    logs.setup()
    out = fsio.expand(args.out).absolute()
    encoder = Encoder(None if args.tokenizer is None else fsio.expand(args.tokenizer).absolute(), args.end)
    index = tokenize(args.names, out, encoder, field=args.field, shard_tokens=args.shard_tokens)
    if args.json:
        print(arguments.as_json(index.to_json()))
    else:
        print(f"{out}: {index.tokens:,} tokens of {index.documents:,} documents, vocabulary {index.vocabulary:,}")
        terminal.say(f"train on it: `toolkit submit configs/gpt_fsdp.yaml data.name=tokens data.root={out}`")
