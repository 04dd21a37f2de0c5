"""`toolkit site init --schema`: what an editor is told of the config, by the judgement of the package jsonschema."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from tests.pages import ROOT
from toolkit.base.errors import EXIT_REQUEST, ConfigError
from toolkit.cli import main as cli
from toolkit.config import JobConfig, all_keys, load_config, value_of
from toolkit.constraints import limits_of
from toolkit.plugins.site import site_file

SCHEMA = json.loads(site_file.schema_json())
VALIDATOR = Draft7Validator(SCHEMA)
#: Values of all types.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    3,
    0.5,
    -7,
    10**14,
    "word",
    "",
    "auto",
    [],
    [2],
    ["a"],
    {},
    {"a": 2},
    {"a": []},
)


def test_it_is_a_schema_that_explains_all_keys_and_has_their_defaults() -> None:
    Draft7Validator.check_schema(SCHEMA)
    for key in {*all_keys()} - {"params"}:
        at = SCHEMA
        for part in key.split("."):
            assert at["description"] or at["properties"], key
            assert at["additionalProperties"] is False
            at = at["properties"][part]
        assert at["default"] == value_of(JobConfig(), key)
    assert SCHEMA["properties"]["optim"]["properties"]["lr"]["description"] == "the rate after the warm-up"
    assert "fsdp" in SCHEMA["properties"]["strategy"]["properties"]["name"]["anyOf"][0]["enum"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("wrong", "place", "says"),
    [
        ({"optimm": {}}, [], "'optimm' was unexpected"),
        ({"optim": {"lrr": 0.1}}, ["optim"], "'lrr' was unexpected"),
        ({"optim": {"lr": "fast"}}, ["optim", "lr"], "'fast'"),
        ({"strategy": {"name": "ddpp"}}, ["strategy", "name"], "'ddpp'"),
        ({"cluster": {"nodes": 0}}, ["cluster", "nodes"], "less than the minimum of 1"),
        ({"cluster": {"account": 755}}, ["cluster", "account"], "not of type"),
        ({"cluster": 4}, ["cluster"], "not of type 'object'"),
        ({"train": {"epochs": None}}, ["train", "epochs"], "None"),
        ({"notify": {"command": "mail"}}, ["notify", "command"], "not of type 'array'"),
    ],
)
def test_a_mistake_is_marked_at_its_place(wrong: dict[str, Any], place: list[str], says: str) -> None:
    error = best_match(VALIDATOR.iter_errors(wrong))
    assert list(error.absolute_path) == place
    assert says in error.message


def test_what_refers_to_another_key_is_valid_where_a_number_or_a_word_is_due() -> None:
    VALIDATOR.validate({"extends": "base.yaml", "sweep": {"optim.lr": [0.1]}, "params": {"width": 3}})
    for time in (90, "4h", "1d 2h", "2:00:00", "1-12"):
        VALIDATOR.validate({"cluster": {"time_min": time}})
    VALIDATOR.validate({"optim": {"min_lr": "${optim.lr}", "schedule": "${params.schedule}"}})


def test_it_agrees_with_the_toolkit_about_each_key_and_type() -> None:
    for key in {*all_keys()} - {"params", "job"}:
        for value in VALUES:
            nested: dict[str, Any] = {}
            at = nested
            *sections, name = key.split(".")
            for section in sections:
                at = at.setdefault(section, {})
            at[name] = value
            is_valid = VALIDATOR.is_valid(nested)
            try:
                load_config(None, nested, site=False)
                is_read = True
            except ConfigError:
                is_read = False
            with suppress(ConfigError):  # some of these limits can be told in a schema
                for limit in limits_of(JobConfig)[key] if is_read else ():
                    limit.check(key, value)
                assert is_valid == is_read, nested


def test_the_command_writes_it_and_the_line_for_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # its own file is replaced
        assert cli.main(["site", "init", "--schema"]) == 0
        path = tmp_path / "toolkit.schema.json"
        assert json.loads(path.read_text()) == SCHEMA
        assert capsys.readouterr().out.endswith(f"\n# yaml-language-server: $schema={path}\n")
    (tmp_path / "mine.json").write_text("{}")
    assert cli.main(["site", "init", "--schema", "mine.json"]) == EXIT_REQUEST
    assert "--schema:" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "{}"
