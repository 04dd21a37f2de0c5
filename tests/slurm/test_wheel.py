"""The wheel on a cluster, where there is no checkout."""

import pytest

from tests.slurm.site import Site
from tests.wheel import install_wheel

pytestmark = [pytest.mark.slurm, pytest.mark.soak]


def test_a_new_project_trains_on_slurm_and_its_own_test_passes(site: Site) -> None:
    wheel = install_wheel(site.folder / "wheel")
    home = site.folder / "home"
    home.mkdir()
    site.give(site.folder)
    commands = "toolkit new demo && cd demo && toolkit submit demo.yaml --follow && python -m pytest -q"
    path = f"{wheel.toolkit.parent}:/usr/bin:/bin"
    said = site.run("bash", "-euxc", commands, cwd=home, PATH=path, HOME=str(home))
    assert f"{wheel.toolkit} tensorboard" in said
    assert "1 passed" in said
    run = site.only_run()
    assert [(attempt.cause, attempt.nodes) for attempt in run.attempts()] == [("completed", ("node1",))]
