"""Ranks on this machine that run from a copy of their environment.

Where the copy is damaged they run without it.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.dist

SCRIPT = """
import json, marker, os, sys, toolkit
print(json.dumps({"marker": marker.__file__, "prefix": sys.prefix, "data": str(toolkit.staged("DATA"))}))
"""


def small_environment(prefix: Path) -> Path:
    """Make an environment with a module of its own, and return its Python. Others come from the tests' own."""
    venv.create(prefix, symlinks=True, with_pip=False)
    site = next(prefix.glob("lib/*/site-packages"))
    (site / "marker.py").write_text("")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[2]}\n")
    return prefix / "bin/python"


def test_ranks_use_the_copy_and_without_it_the_original(env: dict[str, str], tmp_path: Path) -> None:
    prefix, data = tmp_path / "venv", tmp_path / "data"
    python = small_environment(prefix)
    data.mkdir()
    (data / "x").write_text("x")
    (tmp_path / "script.py").write_text(SCRIPT.replace("DATA", f"{data}/x"))
    with tempfile.TemporaryDirectory() as node:
        env = {**env, "PATH": f"{prefix}/bin:{env['PATH']}"}
        keys = ["cluster.stage=always", f"cluster.stage_dir={node}", f"data.stage=[{data},{tmp_path}/none]"]

        def run(name: str) -> tuple[dict[str, Any], str]:
            command = [str(python), "-m", "toolkit", "exec", "--executor", "local", "--wait", *keys, f"name={name}"]
            subprocess.run([*command, "--", "python", "script.py"], cwd=tmp_path, env=env, check=True, timeout=120)
            [folder] = (tmp_path / "runs" / name).iterdir()
            told = "\n".join(json.loads((folder / "status.json").read_text())["staging"])
            line = RunDir(folder).rank_log(1, 0).read_text().splitlines()[0]
            return json.loads(line), told

        rank, told = run("first")
        assert Path(rank["prefix"]).is_relative_to(node)
        assert Path(rank["marker"]).is_relative_to(rank["prefix"])
        assert Path(rank["data"]).is_relative_to(node)
        assert f"{tmp_path}/none is not copied to the nodes" in told
        assert "nodes with a copy: 1 of 1, made within" in told

        # a byte of each package changes, and the copies are gone: the run continues with what they are copies of
        shutil.rmtree(node)
        Path(node).mkdir()
        for package in (tmp_path / "runs/.stage").glob("*.tar"):
            content = bytearray(package.read_bytes())
            content[700] ^= 1
            package.write_bytes(content)
        rank, told = run("second")
        assert rank == {"marker": str(next(prefix.glob("lib/*/site-packages")) / "marker.py"), "prefix": str(prefix),
                        "data": f"{data}/x"}  # fmt: skip
        assert "nodes with a copy: 0 of 1" in told

        # the damaged packages have been thrown away
        rank, told = run("third")
        assert Path(rank["marker"]).is_relative_to(node)
    assert sys.prefix != rank["prefix"]
