"""write the defaults of this site, from what Slurm says about it"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError

EXAMPLES = (
    ("toolkit init", "write the site's defaults, if there are none"),
    ("toolkit init --partition gpu --print", "show those for another partition"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--partition", help="for jobs there; default: the cluster's default partition")
    parser.add_argument("--print", action="store_true", dest="only_print", help="show the file and write nothing")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: Namespace) -> None:
    from toolkit.base import logs, terminal
    from toolkit.plugins.site import doctor, site_file

    logs.setup()
    profile, about_profile = doctor.read_site_here()
    if profile is None:
        raise RequestError(f"toolkit init: {about_profile}. Without Slurm no defaults are needed")
    text = site_file.text_of(profile, args.partition)
    if args.only_print:
        print(text, end="")
        return
    path = site_file.write(text, force=args.force)
    print(text, end="")
    terminal.say(f"\n{path}: written; every command takes it as defaults\n{about_profile}")
