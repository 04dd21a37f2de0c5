"""print the script by which a shell completes commands and keys

Put the line of your shell into its start-up file: ~/.bashrc, ~/.zshrc or
~/.config/fish/config.fish.
"""

from argparse import ArgumentParser, Namespace

EXAMPLES = (
    ("toolkit completion bash", 'for ~/.bashrc: eval "$(toolkit completion bash)"'),
    ("toolkit completion zsh", 'for ~/.zshrc: eval "$(toolkit completion zsh)"'),
    ("toolkit completion fish", "for config.fish: toolkit completion fish | source"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(args: Namespace) -> None:
    from toolkit.cli import completion

    print(completion.SCRIPTS[args.shell], end="")
