"""Measures the GPUs of a job's nodes before the first ranks start, and compares them."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

from toolkit.base import logs
from toolkit.nodes.agent.messages import CheckAnswered, CheckOrder
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents, NodeAnswered
from toolkit.nodes.start.launcher import Events

#: An answer takes the import of torch and five seconds of work.
WAIT_S = 60.0
LOOK_EVERY_S = 0.2
#: A GPU is slow below this share of the median of the job's GPUs. Healthy ones of a kind differ by some percent.
SLOW_SHARE = 0.9
#: Fewer GPUs are not compared: their median would not tell which of them is slow.
LEAST_GPUS = 4
#: The test ends itself this long before. The ranks start then, and a CUDA context beside them would take their memory.
MARGIN_S = 5
COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.site.gpu_measure", f"{WAIT_S - MARGIN_S:.0f}")
_WORDS = {"gemm": "multiplies matrices at", "copy": "copies from the host at"}

log = logs.get(__name__)


def slow_nodes(agents: Agents, job: Allocation, events: Events) -> dict[str, str]:
    """Return the nodes of a job with a slow GPU, see :func:`slow_gpus`. A job of few GPUs has none.

    Components may have GPUs of different kinds: each is compared with itself.
    """
    slow: dict[str, str] = {}
    for hosts in job.by_component:
        if sum(job.gpus_of[host] for host in hosts) >= LEAST_GPUS:
            slow |= slow_gpus(agents, hosts, events)
    return slow


def slow_gpus(agents: Agents, hosts: Sequence[str], events: Events) -> dict[str, str]:
    """Return the nodes with a GPU that is slower than the job's others.

    Each comes with a line on what is slow. A node that does not answer in time, or has no torch outside its container,
    is left out. Anything in ``events``, such as a signal, ends the wait, and stays there.
    """
    order = CheckOrder(tuple(COMMAND))
    heard: Events = SimpleQueue()
    awaited, texts = {*hosts} - agents.silent_hosts, dict[str, str]()
    number = agents.request(dict.fromkeys(awaited, order), heard)
    deadline = time.monotonic() + WAIT_S
    while awaited and events.empty() and time.monotonic() < deadline:
        try:
            event = heard.get(timeout=LOOK_EVERY_S)
        except Empty:
            continue
        if isinstance(event, NodeAnswered) and isinstance(event.message, CheckAnswered):
            texts[event.host] = event.message.text
        awaited.discard(event.host)
    agents.withdraw(number)
    return compare(texts)


def compare(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes with a slow GPU, by the texts that the nodes have printed."""
    slow: dict[str, list[str]] = {}
    for kind, words in _WORDS.items():
        speeds: dict[tuple[str, int], float] = {}
        for host, text in texts.items():
            speeds |= {(host, gpu): speed for gpu, speed in enumerate(_speeds(text, kind))}
        if len(speeds) < LEAST_GPUS:
            continue
        usual = statistics.median(speeds.values())
        for (host, gpu), speed in speeds.items():
            if speed < SLOW_SHARE * usual:
                share = f"{speed / usual:.0%}".replace("%", " %")
                slow.setdefault(host, []).append(f"GPU {gpu} {words} {share} of the others' speed")
    return {host: "; ".join(found) for host, found in slow.items()}


def _speeds(text: str, kind: str) -> list[float]:
    try:
        return [float(speed) for speed in json.loads(text)[kind]]
    except (ValueError, TypeError, LookupError):
        log.warning("the speed of a node's GPUs is not known: %.200s", text.strip())
        return []
