"""Watches one node while ranks work: a child of the node's agent, see :mod:`toolkit.plugins.node_watch.node_monitor`.

It prints lines of JSON: ``{"usage": ...}`` at each sample of what the job uses, ``{"sick": "..."}`` for each problem of
the node, once. A problem either stays (memory that has failed) or has lasted for minutes, because every node is hot now
and then. It is a process of its own because a faulty disk or driver lets a reader wait for ever, and the agent must not
wait. It needs only Python's standard library, and starts without the site's packages.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict

from toolkit.devices.watched import GpusError
from toolkit.plugins.node_watch import usage
from toolkit.plugins.node_watch.drivers import open_gpus
from toolkit.plugins.node_watch.sickness import LOOK_EVERY_S, Sickness

#: Seconds between two samples. The first ones come sooner: a job may be short.
FIRST_SAMPLE_S, SAMPLE_EVERY_S, RAREST_SAMPLE_S = 1.0, 15.0, 120.0
#: Samples may use at most this share of one CPU, counted as if CREDIT_S had passed before the first one.
MOST_COST, CREDIT_S = 0.0008, 150.0
#: The first look at the node's health comes late enough not to delay the first ranks.
FIRST_LOOK_S = 10.0


def wait_s(number: int, cost_s: float, elapsed_s: float) -> float:
    """Return the seconds from sample ``number``, counted from 0, to the next.

    All samples so far have taken ``cost_s`` on a processor, within ``elapsed_s``.
    """
    usual_s = min(FIRST_SAMPLE_S * 2.0 ** min(number, 9), SAMPLE_EVERY_S)
    return min(max(usual_s, cost_s / MOST_COST - CREDIT_S - elapsed_s), RAREST_SAMPLE_S)


def main() -> None:
    """Write samples and findings until the agent dies: the kernel then kills this process."""
    # Without a driver that works, everything but the GPUs is still watched.
    gpus = None
    try:
        gpus = open_gpus(os.environ)
        if gpus is not None and gpus.cannot_tell:
            _show(log=f"of the GPUs less is known: {gpus.cannot_tell}")
    except GpusError as error:
        _show(log=f"the GPUs are not watched: {error}")
    sampler = usage.NodeSampler(usage.JobProcesses(os.getppid(), os.environ), gpus)
    health, number, cost_s = Sickness(gpus=gpus), 0, 0.0
    next_sample = began = time.monotonic()
    next_look = began + FIRST_LOOK_S
    while True:
        now = time.monotonic()
        # What all samples have cost so far decides how soon the next one may come, see MOST_COST.
        if now >= next_sample:
            used_s = time.process_time()
            _show(usage=asdict(sampler.sample()))
            cost_s += time.process_time() - used_s
            next_sample = now + wait_s(number, cost_s, now - began)
            number += 1
        if now >= next_look:
            next_look = now + LOOK_EVERY_S
            for finding in health.look():
                _show(sick=finding)
        time.sleep(max(0.0, min(next_sample, next_look) - time.monotonic()))


def _show(**message: object) -> None:
    print(json.dumps(message), flush=True)
