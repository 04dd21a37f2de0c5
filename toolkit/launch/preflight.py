"""Preflight: the checks of `toolkit.cluster.checks` on every node at once, and what they mean for the nodes together.

The conversation goes through srun's own channels: what the nodes say is its labelled stdout, and what they are told
(who their peers are) is its stdin, which srun hands to all. So nothing has to be reachable that srun does not reach
anyway, and nothing is asked of a disk of which it is to be found out whether it works.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from toolkit import fsio
from toolkit.cluster import hostlist
from toolkit.cluster.checks import LAUNCHER, TOKEN_VARIABLE, Finding, Request, pairs, storage
from toolkit.cluster.checks.verdict import Heard, Outcome, Report, judge, prevented
from toolkit.cluster.commands import srun_nodes_argv
from toolkit.errors import RequestError
from toolkit.launch.srun import parse_srun_line
from toolkit.launch.steps import LaunchFailed, RankEnded
from toolkit.launch.talk import (
    Complaint,
    Ended,
    Said,
    SubprocessTalk,
    Talk,
    bare_python,
    talk_with_nodes,
    without_label,
)

#: The whole of it, whatever hangs.
LIMIT_S = 30.0
#: Nodes that have not said by then where they listen are left out of the pairs.
GATHER_S = 6.0
#: The list of all peers goes to every node, since srun gives all tasks the same stdin: larger jobs meet in no pairs.
MOST_IN_PAIRS = 512
#: What the caller does on the shared folder itself.
FOLDER_LIMIT_S = 4.0
T = TypeVar("T")


# --------------------------------------------------------------------------------------------- talking with the nodes


Start = Callable[[Request, Sequence[str]], Talk]


def srun_step(environ: Mapping[str, str]) -> Start:
    """Starts the checks on these hosts of our allocation, beside whatever runs there."""

    def start(request: Request, hosts: Sequence[str]) -> Talk:
        return talk_with_nodes(_command(request), hosts, _with_token(environ, request))

    return start


def srun_job(options: Sequence[str], environ: Mapping[str, str]) -> Start:
    """Starts the checks on as many nodes as there are hosts, but on such as Slurm chooses, and waits until it has."""

    def start(request: Request, hosts: Sequence[str]) -> Talk:
        talk = SubprocessTalk(srun_nodes_argv(_command(request), len(hosts), options), _with_token(environ, request))
        talk.wait_for_a_word()
        return talk

    return start


def this_machine(environ: Mapping[str, str]) -> Start:
    """Starts the checks here, without Slurm."""
    return lambda request, _: SubprocessTalk(_command(request), _with_token(environ, request))


def _with_token(environ: Mapping[str, str], request: Request) -> dict[str, str]:
    return {**environ, TOKEN_VARIABLE: request.token}


def _command(request: Request) -> list[str]:
    asked = {name: value for name, value in asdict(request).items() if name != "token"}
    return bare_python("toolkit.cluster.checks.__main__", json.dumps(asked))


# ----------------------------------------------------------------------------------------------------- the conversation


class Conversation:
    """Listens to the nodes, introduces them to each other, and dismisses them when all are done or time is up."""

    def __init__(self, hosts: Sequence[str], talk: Talk, limit_s: float, *, in_pairs: bool) -> None:
        self._nodes = [Heard(host) for host in hosts]
        self._talk = talk
        self._asked = talk.began
        self._deadline = time.monotonic() + limit_s
        self._gather_until = time.monotonic() + min(GATHER_S, limit_s / 2)
        self._exchanges: dict[pairs.Pair, pairs.Exchange] = {}
        self._is_introduced = not in_pairs
        self._errors: list[str] = []
        self._is_over = False
        self._awaited = set(range(len(hosts)))  #: tasks that are not done
        self._unplaced = set(range(len(hosts)))  #: tasks that have not said where they listen
        self._are_named = False

    def outcome(self) -> Outcome:
        """Hold it."""
        while not self._is_over and time.monotonic() < self._deadline and self._awaited:
            with contextlib.suppress(Empty):
                self._take(self._talk.events.get(timeout=self._patience_s()))
            if not self._is_introduced and (not self._unplaced or time.monotonic() >= self._gather_until):
                self._introduce()
        while not self._is_over and self._awaited and not self._talk.events.empty():  # it was said in time
            self._take(self._talk.events.get())
        self._talk.end()
        return Outcome(self._nodes, self._exchanges, self._errors)

    def _patience_s(self) -> float:
        until = self._deadline if self._is_introduced else min(self._deadline, self._gather_until)
        return max(0.0, until - time.monotonic())

    def _take(self, event: Said | Complaint | Ended) -> None:
        match event:
            case Said(task, text, received) if task < len(self._nodes):
                node = self._nodes[task]
                try:
                    self._hear(node, json.loads(text), received)
                    node.is_here = True
                except (ValueError, TypeError, KeyError, RequestError):
                    node.noise = text.strip()
                self._note_progress(task)
            case Complaint(text):
                self._take_complaint(text)
            case Ended():
                self._is_over = True

    def _note_progress(self, task: int) -> None:
        node = self._nodes[task]
        if node.is_done or node.is_gone:
            self._awaited.discard(task)
        if node.is_placed or node.is_gone:
            self._unplaced.discard(task)

    def _take_complaint(self, text: str) -> None:
        """A node's own, which is labelled, or srun's. Tasks of which it says that they failed are not waited for."""
        task, words = without_label(text)
        if task is not None and task < len(self._nodes):
            self._nodes[task].noise = words
            return
        self._errors.append(text)
        event = parse_srun_line(text, [node.name for node in self._nodes])
        named = event.ranks if isinstance(event, (RankEnded, LaunchFailed)) else ()
        for rank in {*named} & {*range(len(self._nodes))}:
            self._nodes[rank].is_gone = True
            self._note_progress(rank)

    def _hear(self, node: Heard, said: Any, received: float) -> None:
        if not isinstance(said, dict):
            raise TypeError(f"not a line of ours: {said!r}")
        if "time" in said:
            node.set_clock(said["time"], self._asked, received)
        if "hello" in said:
            if said["nodes"] and not self._are_named:
                self._name_the_silent(said["nodes"])
                self._are_named = True
            node.name = str(said["hello"])
        elif "check" in said:
            node.findings.append(Finding.parse(said))
        elif "listening" in said:
            address, port = said["listening"]
            node.listening = (address, port)
        elif "peer" in said:
            self._exchanges[node.name, said["peer"]] = pairs.Exchange(**said)
        elif "done" in said:
            node.is_done = True

    def _name_the_silent(self, node_list: str) -> None:
        """Who chose no nodes learns even the names of those that say nothing."""
        for node, name in zip(self._nodes, hostlist.expand(node_list), strict=False):
            node.name = node.name if node.is_here else name

    def _introduce(self) -> None:
        listening = [(node.name, *node.listening) for node in self._nodes if node.listening is not None]
        self._is_introduced, self._asked = True, time.time()
        self._talk.send(json.dumps({"peers": listening}))


_UNREACHED = re.compile(r"launch .*failed on node (\S+?):")


def converse(request: Request, hosts: Sequence[str], start: Start, limit_s: float) -> Outcome:
    """Have ``request`` carried out on every host that srun reaches: where it does not reach one, it ends all others."""
    began = time.monotonic()
    outcome = Conversation(hosts, start(request, hosts), limit_s, in_pairs=request.pairs).outcome()
    unreached = {match[1] for match in map(_UNREACHED.search, outcome.errors) if match} & set(hosts)
    rest = [host for host in hosts if host not in unreached]
    if not unreached or not rest or all(node.is_done for node in outcome.nodes):
        return outcome
    cpus = [request.cpus_of(task) for task, host in enumerate(hosts) if host not in unreached]
    again = replace(request, cpus=shortened(cpus), pairs=meet_in_pairs(len(rest)))
    left_s = limit_s - (time.monotonic() - began)
    second = Conversation(rest, start(again, rest), left_s, in_pairs=again.pairs).outcome()
    lost = [node for node in outcome.nodes if node.name in unreached]
    return Outcome([*second.nodes, *lost], second.exchanges, [*outcome.errors, *second.errors])


def meet_in_pairs(nodes: int) -> bool:
    """Whether so many nodes exchange data in pairs."""
    return 1 < nodes <= MOST_IN_PAIRS


def shortened(cpus: Sequence[int]) -> Sequence[int]:
    """``Request.cpus`` with one entry where all nodes need the same: srun hands it to every node."""
    return cpus[:1] if len(set(cpus)) == 1 else cpus


def check_nodes(
    folder: Path,
    hosts: Sequence[str],
    tasks: Sequence[int],
    cpus_per_task: int,
    gpus_per_node: int = 0,
    *,
    environ: Mapping[str, str],
    start: Start | None = None,
    limit_s: float = LIMIT_S,
) -> Report:
    """Check every node of ``hosts``, at once, within ``limit_s``. It raises nothing for a node that is sick.

    ``folder`` is the run's, on the file system that all share; ``tasks`` is the number of ranks on each host, 0 for a
    spare, which has to do for any of the others. In an allocation ``environ`` is that of the batch script, and the
    caller stands on ``hosts[0]``; without Slurm there is one host, this machine.
    """
    shared = SharedFolder(folder)
    request = Request(
        folder=str(shared.path),
        token=shared.token,
        cpus=shortened([(count or max(tasks)) * cpus_per_task for count in tasks]),
        gpus=gpus_per_node,
        peer=LAUNCHER if "SLURM_JOB_ID" in environ else "127.0.0.1",
        pairs=meet_in_pairs(len(hosts)),
    )
    start = start or (srun_step(environ) if "SLURM_JOB_ID" in environ else this_machine(environ))
    return examine(shared, hosts, request, start, limit_s, trusted=hosts[0])


def examine(
    shared: SharedFolder, hosts: Sequence[str], request: Request, start: Start, limit_s: float, trusted: str | None
) -> Report:
    """Have ``request`` carried out on ``hosts`` and judge; ``trusted`` is the one on which we stand."""
    began = time.monotonic()
    try:
        in_the_way = shared.prepare()
        if in_the_way is not None:
            return prevented(hosts, in_the_way, time.monotonic() - began)
        left_s = limit_s - FOLDER_LIMIT_S - (time.monotonic() - began)
        outcome = converse(request, hosts, start, left_s)
        shared.read_answers(outcome.nodes)
    except OSError as error:
        return prevented(hosts, str(error), time.monotonic() - began)
    finally:
        shared.remove()
    return judge(outcome, trusted, time.monotonic() - began)


class SharedFolder:
    """A folder in the run's for a word of ours to every node, and one of every node's to us."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f".preflight-{secrets.token_hex(4)}"
        self.token = secrets.token_hex(16)

    def prepare(self) -> str | None:
        """Write our word; what was in the way, or None."""
        try:
            _within(FOLDER_LIMIT_S, self._write)
        except OSError as error:
            return f"{self.path.parent}: cannot be written to from {socket.gethostname()}: {error.strerror or error}"
        return None

    def _write(self) -> None:
        fsio.make_dir(self.path)
        fsio.write_atomic(self.path / storage.TOKEN, self.token, durable=False)

    def read_answers(self, nodes: Sequence[Heard]) -> None:
        """Replace the finding of each node whose word is not to be seen here."""
        try:
            unseen = _within(FOLDER_LIMIT_S, lambda: self._unseen([node.name for node in nodes if _wrote(node)]))
        except OSError:  # it hangs here, since the nodes were asked
            unseen = set()
        text = (
            f"what it writes to {self.path.parent} is not seen on {socket.gethostname()}: it has another folder there, "
            "or a stale one; have its file system mounted anew"
        )
        for node in nodes:
            if node.name in unseen:
                node.findings.append(Finding("shared folder", "bad", "differs", text))

    def _unseen(self, names: Sequence[str]) -> set[str]:
        deadline = time.monotonic() + storage.SEEN_WITHIN_S
        return {
            name
            for name in names
            if storage.read_soon(self.path / name, self.token, deadline - time.monotonic()) != self.token
        }

    def remove(self) -> None:
        """Not worth an error: it is a few bytes in a folder of the run."""
        with contextlib.suppress(OSError):
            _within(FOLDER_LIMIT_S, lambda: fsio.remove_tree(self.path))


def _wrote(node: Heard) -> bool:
    return any(f.check == "shared folder" and f.severity == "ok" for f in node.findings)


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """``call()``. Raises its OSError, or TimeoutError (which is one) after ``limit_s``: the call may hang on."""
    answers: SimpleQueue[T | OSError] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(call())
        except OSError as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s") from None
    if isinstance(answer, OSError):
        raise answer
    return answer
