"""The toolkit's data sets are read from a node's own copy where there is one."""

import json
from pathlib import Path

import pytest

from toolkit.base import staged
from toolkit.config.catalog import data_root


def test_the_root_of_the_data_is_the_node_s_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy/images").mkdir(parents=True)
    monkeypatch.setenv(staged.VARIABLE, json.dumps({"/shared": str(tmp_path / "copy")}))
    assert data_root("/shared/images") == tmp_path / "copy/images"
    assert data_root("/other") == Path("/other")
