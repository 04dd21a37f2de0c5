"""`toolkit data tokenize`: token shards of texts."""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        f"{parser.usage}\n"
        "       toolkit data tokenize IN [IN ...] --out DIR [--tokenizer FILE]\n"
        "                [--end TOKEN] [--field NAME] [--shard-tokens N] [--json]"
    )
    parser.add_argument("--out", metavar="DIR", help="tokenize: the folder of the token shards")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenize: a tokenizer.json; default: each byte is a token")
    parser.add_argument("--end", metavar="TOKEN", help="tokenize: ends a document; default such as </s>")
    parser.add_argument("--field", default="text", metavar="NAME", help="tokenize: the text in a .jsonl; default text")
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokenize: of a file; default 100 million"
    )
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit.base import fsio, logs, terminal
    from toolkit.base.errors import RequestError
    from toolkit.cli import show
    from toolkit.plugins.formats.tokens.writer import Encoder, tokenize

    if args.out is None:
        raise RequestError("toolkit data tokenize: --out DIR says where to")
    if args.shard_tokens < 1:
        raise RequestError("toolkit data tokenize: --shard-tokens is to be 1 or more")
    logs.setup()
    out = fsio.expand(args.out).absolute()
    encoder = Encoder(None if args.tokenizer is None else fsio.expand(args.tokenizer).absolute(), args.end)
    index = tokenize(args.names, out, encoder, field=args.field, shard_tokens=args.shard_tokens)
    if args.json:
        print(show.as_json(index.to_json()))
    else:
        print(f"{out}: {index.tokens:,} tokens of {index.documents:,} documents, vocabulary {index.vocabulary:,}")
        terminal.say(f"train on it: `toolkit submit configs/gpt_fsdp.yaml data.name=tokens data.root={out}`")
