"""Secrets of a run: the config names their sources, and only ranks read the values.

``secrets: {HF_TOKEN: ~/.hf_token, WANDB_API_KEY: env}``. Each rank reads a file on its own node, so its value is in no
file of the run, no command line, and no environment of supervisor, agents or Slurm. With ``env`` the value is in the
job's environment already, because Slurm hands on the variables of the process that submits.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from toolkit.base import fsio, trust
from toolkit.base.errors import ConfigError

#: As the source of a secret: the variable of that name in the job's environment.
FROM_ENVIRONMENT = "env"
#: In a rank: the names of its secrets, with commas between them.
NAMES_VARIABLE = "TOOLKIT_SECRETS"
#: The kernel takes no longer text as one variable (MAX_ARG_STRLEN).
MOST_BYTES = 128 * 1024 - 1024
#: Shorter values are not masked: they are parts of ordinary words and numbers.
MASKED_LENGTH = 8
#: The secrets of this process, a rank, by name; only `give_to_rank` changes it. The values are kept because a program
#: may take a secret out of its environment, and print it later.
_given: dict[str, str] = {}
#: Variables that the toolkit, Slurm or Python sets for a rank.
_TAKEN = re.compile(
    r"(SLURMD?|SBATCH|SRUN|TOOLKIT|TORCHELASTIC|LD|PMIX?|OMPI)_.*|PYTHON.*|MASTER_(ADDR|PORT)|(\w+_)?RANK"
    r"|(\w+_)?WORLD_SIZE|PATH|HOME|USER|SHELL"
)


def check_form(secrets: Mapping[str, str]) -> None:
    """Refuse names that are no variables, and what is no source. Raises ConfigError, which never shows a value."""
    for name, source in secrets.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or _TAKEN.fullmatch(name):
            raise ConfigError(
                f"secrets: {name!r} cannot be the name of a secret: it is a variable of the ranks, of letters, digits "
                "and _, and not one that the toolkit, Slurm or Python sets itself"
            )
        # A user may have written the secret itself: do not show it.
        if source != FROM_ENVIRONMENT and not source.startswith(("/", "~")):
            raise ConfigError(
                f"secrets.{name}: takes `{FROM_ENVIRONMENT}`, for the variable {name} of your shell, or the absolute "
                "path of a file that holds the secret; never the secret itself, which everybody could then read in a "
                "config or a command line"
            )


def check_sources(secrets: Mapping[str, str]) -> None:
    """Refuse secrets that are missing here, or that others may read. Raises ConfigError."""
    for name, source in secrets.items():
        _read(name, source)


def give_to_rank(secrets: Mapping[str, str]) -> None:
    """Set the secrets as variables of this process, a rank. Mask them in what it prints.

    Raises ConfigError for one that this node does not have.
    """
    if not secrets:
        return
    _given.update({name: _read(name, source) for name, source in secrets.items()})
    os.environ.update({name: _given[name] for name in secrets})
    os.environ[NAMES_VARIABLE] = ",".join(secrets)
    for stream in (sys.stdout, sys.stderr):
        _mask_stream(stream)


def masked(text: str) -> str:
    """Return ``text`` without the values of this rank's secrets.

    Those in the environment count, too: a process that a rank has started was given none itself.
    """
    names = filter(None, os.environ.get(NAMES_VARIABLE, "").split(","))
    return _mask(text, {*_given.items(), *((name, os.environ.get(name, "")) for name in names)})


def masked_of(secrets: Mapping[str, str], text: str) -> str:
    """Return ``text``, which ranks have written, without the values of their secrets.

    The values are read for this moment only. One that cannot be read here is not masked.
    """
    pairs = set()
    for name, source in secrets.items():
        with contextlib.suppress(ConfigError):
            pairs.add((name, _read(name, source)))
    return _mask(text, pairs)


def _mask(text: str, pairs: Collection[tuple[str, str]]) -> str:
    # The longest first: one secret may be a part of another.
    for name, value in sorted(pairs, key=lambda pair: (-len(pair[1]), pair)):
        if len(value) >= MASKED_LENGTH:
            text = text.replace(value, f"[secret {name}]")
    return text


def _mask_stream(stream: object) -> None:
    """Have all that Python writes to ``stream`` masked. What C code and other programs write is not."""
    write = getattr(stream, "write", None)
    if write is None or hasattr(write, "is_masking"):
        return

    def write_masked(text: str) -> object:
        return write(masked(text))

    write_masked.is_masking = True  # type: ignore[attr-defined]
    # The stream stays the same object: handlers of logging, and libraries, have kept it.
    stream.write = write_masked  # type: ignore[attr-defined]


def _read(name: str, source: str) -> str:
    """Return the value of a secret. Raises ConfigError, with the key and the host."""
    if source == FROM_ENVIRONMENT:
        value = os.environ.get(name)
        if not value:
            state = "is not set" if value is None else "is empty"
            raise _error(f"secrets.{name}", f"the variable {name} {state}; export it before you submit, or name a file")
        return value
    return read_file(f"secrets.{name}", source)


def read_file(key: str, source: str) -> str:
    """Return the secret in a file of the user's. Raises ConfigError, with the key and the host, never the secret."""
    path = fsio.expand(source)
    try:
        fd = fsio.open_regular(str(path), os.O_RDONLY)
        try:
            _refuse_open_file(key, path, os.fstat(fd))
            content = os.read(fd, MOST_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise _error(key, f"{path} cannot be read: {error.strerror}; every node must see that file") from None
    try:
        value = content.decode().strip("\r\n")
    except UnicodeDecodeError:
        value = "\0"  # refused below, as other binary content is
    if not value or "\0" in value or len(content) > MOST_BYTES:
        raise _error(key, f"{path} must hold the secret as text: it is empty, too long for a variable, or binary")
    return value


def webhook(key: str, source: str) -> str:
    """Return the address in a file of the user's. Raises ConfigError, which does not show it."""
    address = read_file(key, source)
    if not re.fullmatch(r"https?://[!-~]+", address):
        raise _error(key, f"{fsio.expand(source)} must hold one line, an address that begins with https://")
    return address


def _refuse_open_file(key: str, path: Path, status: os.stat_result) -> None:
    """Refuse a file that others may read or write, or that belongs to someone else."""
    if status.st_uid != os.geteuid():
        owner = trust.user_name(status.st_uid)
        why = f"{path} belongs to {owner}; a secret is read from a file of your own: copy it, and chmod 600"
        raise _error(key, why)
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise _error(key, f"others may read or change {path} (mode {mode}); close it: chmod 600 {path}")


def _error(key: str, text: str) -> ConfigError:
    return ConfigError(f"{key}: on {socket.gethostname()}: {text}")
