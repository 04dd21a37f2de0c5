"""Ranks that hang, on this machine: the one that is behind is named, and the run completes as if nothing had been."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hangs
from tests.dist.test_local_runs import END_S, TOOLKIT, env, ranks, reached
from tests.waiting import wait_for
from toolkit import rundir
from toolkit.rundir import RunDir

pytestmark = pytest.mark.dist
__all__ = ["env"]  # a fixture

TIMEOUT_S = 40
