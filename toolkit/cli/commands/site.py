"""write the defaults of this site, from what Slurm says about it

With --schema it writes a JSON schema of the config instead: with it an editor
completes keys and words, shows what they are for, and marks mistakes.
"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError

EXAMPLES = (
    ("toolkit site init", "write the site's defaults, if there are none"),
    ("toolkit site init --partition gpu --print", "show those for another partition"),
    ("toolkit site init --schema", "write toolkit.schema.json, and say how an editor uses it"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("verb", choices=["init"])
    parser.add_argument("--partition", help="for jobs there; default: the cluster's default partition")
    parser.add_argument("--print", action="store_true", dest="only_print", help="show the file and write nothing")
    parser.add_argument("--force", action="store_true", help="replace a file that is there; with --on the toolkit, too")
    parser.add_argument("--env", metavar="FOLDER", help="with --on: the environment there; default: found, or made")
    text = "with --on: the folder there for the files of projects, and their runs; default: ~/toolkit"
    parser.add_argument("--projects", metavar="FOLDER", help=text)
    text = "write a JSON schema of the config for editors, and nothing else; default: toolkit.schema.json"
    parser.add_argument("--schema", nargs="?", const="toolkit.schema.json", metavar="FILE", help=text)


def run(args: Namespace) -> None:
    from toolkit.base import logs, terminal
    from toolkit.plugins.site import doctor, site_file

    if args.env or args.projects:
        raise RequestError("toolkit site init: --env and --projects are those of a login node: give --on LOGIN as well")
    if args.schema is not None:
        _write_schema(args.schema)
        return
    logs.setup()
    profile, why_none = doctor.read_site_here()
    if profile is None:
        raise RequestError(f"toolkit site init: {why_none}. Without Slurm no defaults are needed")
    text = site_file.text_of(profile, args.partition)
    if args.only_print:
        print(text, end="")
        return
    path = site_file.write(text, force=args.force)
    print(text, end="")
    terminal.say(f"\n{path}: written; every command takes it as defaults")


def _write_schema(file: str) -> None:
    from toolkit.base import fsio, terminal
    from toolkit.cli.arguments import replaceable_path
    from toolkit.plugins.site import site_file

    path = replaceable_path("--schema", file, site_file.BEGIN)
    fsio.write_atomic(path, site_file.schema_json())
    terminal.say(f"{path}: written. An editor uses it for a config that begins with this line:")
    print(site_file.modeline(path))
