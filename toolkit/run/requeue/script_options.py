"""What a job was asked for in its batch script, for another job like it.

The environment of a job and `scontrol show job` tell its size, nodes and GPUs, not how these are to be connected, whom
to mail, or how tasks share cores. Slurm keeps the script itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.base import logs
from toolkit.base.errors import SlurmError
from toolkit.config import cluster
from toolkit.slurm.commands import Slurm

log = logs.get(__name__)

#: Options that :mod:`toolkit.run.requeue.follow_up` reads back from the job itself, in other terms where need be.
TOLD_BY_JOB = frozenset(
    {
        *("account", "clusters", "cpus-per-task", "job-name", "mem", "mem-per-cpu", "nodes", "ntasks"),
        *("ntasks-per-gpu", "ntasks-per-node", "partition", "reservation", "time"),
        *("constraint", "exclude", "exclusive", "licenses", "nodefile", "nodelist", "oversubscribe", "qos"),
        *("cpus-per-gpu", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "mem-per-gpu"),
        "tres-per-task",
    }
)
#: Those about one job and its place in the queue, its output and the environment of its script.
OF_ONE_JOB = frozenset(
    {
        *("array", "begin", "deadline", "dependency", "hold", "kill-on-invalid-dep", "no-requeue", "requeue"),
        *("chdir", "error", "export", "export-file", "get-user-env", "gid", "input", "open-mode", "output", "uid"),
        *("help", "parsable", "quiet", "reboot", "test-only", "usage", "verbose", "version", "wait", "wrap"),
        "time-min",  # each job might get less time than the one before
    }
)
#: Options that may stand on sbatch's command line alone, by the fields of `scontrol show job`.
SHOWN = {"Switches": "switches", "MailUser": "mail-user", "MailType": "mail-type", "Nice": "nice", "Comment": "comment"}


def script_lines(job_id: str, slurm: Slurm | None = None) -> list[str]:
    """Return the ``#SBATCH`` lines of a job that the job itself does not tell otherwise; none if Slurm does not answer.

    Those of a heterogeneous job are left out: each component has its own.
    """
    slurm = slurm or Slurm()
    try:
        options = dict(options_in(slurm.ask(["scontrol", "write", "batch_script", job_id, "-"])))
        # sbatch's command line, which goes before the script.
        options |= dict(options_shown(slurm.ask(["scontrol", "show", "job", job_id])))
    except SlurmError as error:
        log.warning("a follow-up job does without what only the batch script asks for: %s", error)
        return []
    return [
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"
        for name, value in options.items()
    ]


def _quoted(value: str) -> str:
    """Return a value as sbatch reads it back; it knows no escapes outside quotes."""
    return value if re.fullmatch(r"[^\s\\\"'#]+", value) else '"' + re.sub(r"([\\\"])", r"\\\1", value) + '"'


def options_shown(text: str) -> Iterator[tuple[str, str]]:
    """Yield options and their values from the output of ``scontrol show job``."""
    if "HetJobId=" in text:
        return
    for field, option in SHOWN.items():
        ends = "$" if field == "Comment" else r"(?:\s|$)"  # a free text, which takes its line
        found = re.search(rf"(?:^|\s){field}=(.+?)\s*{ends}", text, re.MULTILINE)
        if found and found[1] not in ("(null)", "0"):
            yield option, found[1]


def options_in(script: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a batch script that another job like it gets, with their values, as sbatch reads them.

    That is from lines up to the first that is neither empty nor a comment.
    """
    words: list[str] = []
    for line in script.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
    if "hetjob" in words or "packjob" in words:
        return
    rest = iter(words)
    for word in rest:
        name, value = _named(word)
        if cluster.FLAGS.get(name) == "value" and value is None:
            value = next(rest, "")
        if name in cluster.FLAGS and name not in TOLD_BY_JOB | OF_ONE_JOB:
            yield name, value


def _words(line: str) -> list[str]:
    """Return the words of a line as sbatch reads them: unlike in a shell, a backslash is an escape in each quote."""
    words, word, quote = list[str](), "", ""
    characters = iter(line + " ")
    for each in characters:
        if each == "\\":
            word += next(characters)
        elif each == quote:
            quote = ""
        elif each in "\"'" and not quote:
            quote = each
        elif each == "#" and not word and not quote:
            break
        elif each.isspace() and not quote:
            words += [word] if word else []
            word = ""
        else:
            word += each
    return words


def _named(word: str) -> tuple[str, str | None]:
    """Return the long name of an option and its value, if that is in the same word."""
    if word.startswith("--"):
        name, is_given, value = word[2:].partition("=")
        longer = [flag for flag in cluster.FLAGS if flag.startswith(name)]  # getopt takes a beginning that is clear
        return longer[0] if name not in cluster.FLAGS and len(longer) == 1 else name, value if is_given else None
    return cluster.SHORT.get(word[1:2], word), word[2:] or None
