"""The meaning of a value in a file or an argument.

YAML 1.2; text keys take text; a config that is written reads back equal.
"""

import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, all_keys, dump_config, load_config, value_of

Load = Callable[[str, str], JobConfig]


def from_file(key: str, value: str, folder: Path) -> JobConfig:
    section, _, leaf = key.rpartition(".")
    inner = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(section.split(".") if section else ()))
    path = folder / "c.yaml"
    path.write_text(f"{inner}{'  ' * len(inner.splitlines())}{leaf}: {value}\n")
    return load_config(path)


def from_extended_file(key: str, value: str, folder: Path) -> JobConfig:
    from_file(key, value, folder)
    (folder / "top.yaml").write_text("extends: c.yaml\n")
    return load_config(folder / "top.yaml")


def from_argument(key: str, value: str, folder: Path) -> JobConfig:
    return load_config(None, [f"{key}={value}"])


@pytest.fixture(params=[from_file, from_extended_file, from_argument, "the site's file"])
def load(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads a config with one key set.

    It sets the key in one of the layers. Every layer gives a value the same meaning.
    """

    def from_site(key: str, value: str, folder: Path) -> JobConfig:
        monkeypatch.delenv("TOOLKIT_SITE", raising=False)
        from_file(key, value, folder)
        monkeypatch.setenv("TOOLKIT_SITE", str(folder / "c.yaml"))
        return load_config(None)

    way = request.param if callable(request.param) else from_site
    return lambda key, value: way(key, value, tmp_path)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("cluster.partition", "no", "no"),
        ("cluster.partition", "on", "on"),
        ("cluster.account", "'0755'", "0755"),
        ("cluster.account", "12:30:45", "12:30:45"),
        ("cluster.account", "2026-01-01", "2026-01-01"),
        ("cluster.account", "1_000", "1_000"),
        ("cluster.constraint", '"1.10"', "1.10"),
        ("cluster.constraint", "!!str 1.10", "1.10"),
        ("cluster.qos", "~", None),
        ("cluster.exclusive", "True", True),
        ("cluster.nodes", "010", 10),
        ("cluster.time_min", "90", 90),
        ("cluster.time_min", "4h", 240),
        ("cluster.time_min", "90m", 90),
        ("cluster.time_min", "1d 2h 3min", 1563),
        ("cluster.time_min", "24:00:00", 1440),
        ("cluster.time_min", "1-12", 2160),
        ("cluster.time_min", "0:00:30", 1),
        ("cluster.nodes", "0o10", 8),
        ("cluster.nodes", "0x10", 16),
        ("optim.lr", "1e-3", 0.001),
        ("optim.lr", "1", 1.0),
        ("train.eval_every", "5", 5),
        ("train.eval_every", "epoch", "epoch"),
        ("cluster.extra.begin", "16:00", "16:00"),
        ("cluster.extra.begin", "2026-01-01", "2026-01-01"),
        ("cluster.extra.comment", "0755", "0755"),
        ("cluster.extra.comment", "1.10", "1.10"),
        ("cluster.extra.comment", "1e3", "1e3"),
        ("cluster.extra.comment", "off", "off"),
        ("cluster.extra.nice", "10", 10),
        ("cluster.extra.hold", "true", True),
    ],
)
def test_a_scalar_means_in_every_layer_what_yaml_1_2_says(load: Load, key: str, written: str, value: object) -> None:
    config = load(key, written)
    *sections, leaf = key.split(".")
    found = value_of(config, ".".join(sections))
    found = found[leaf] if isinstance(found, dict) else getattr(found, leaf)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("cluster.account", "0755", "takes text, and 0755 is a whole number to YAML; quote it: "),
        ("cluster.constraint", "1.10", "takes text, and 1.10 is a number to YAML; quote it: "),
        ("cluster.partition", "true", "takes text, and true is true or false to YAML; quote it: "),
        ("cluster.time_min", "long", "'long' is text; must be minutes, or a time such as 4h, 90min"),
        ("cluster.time_min", "00:30", "Slurm reads this as minutes and seconds: give 00:30:00 for hours and minutes"),
        ("cluster.exclusive", "yes", "'yes' is text; must be true or false"),
        ("cluster.nodes", "'3'", "'3' is text; must be a whole number"),
        ("cluster.nodes", "3.0", "'3.0' is a number; must be a whole number"),
        ("cluster.nodes", "null", "is empty (null); must be a whole number"),
        ("cluster.nodes", "[3]", "takes a whole number, not a list or a mapping"),
        ("cluster.nodes", "!!python/name:os.system x", "is not of the type tag:yaml.org,2002:python/name:os.system"),
        ("cluster.nodes", "9" * 5000, "Exceeds the limit (4300 digits)"),
        ("cluster.setup", "[ls, 3]", "takes text, and 3 is a whole number to YAML"),
        ("cluster.extra", "[a]", "is a mapping: {key: value}"),
    ],
)
def test_another_type_is_refused_in_every_layer_and_says_what_to_write(
    load: Load, key: str, written: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(key, written)
    assert says in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("time=60", "time: unknown key; for sbatch's --time use cluster.time_min"),
        ("gpus=4", "use cluster.gpus_per_node"),
        ("nodes=2", "did you mean 'cluster.nodes'"),
        ("mem=4", "use cluster.mem_gb"),
        ("n=4", "for sbatch's --ntasks use cluster.nodes and cluster.tasks_per_node"),
        ("cluster.cpus-per-gpu=4", "use cluster.cpus_per_task"),
        ("cluster.mail_type=FAIL", "use cluster.extra.mail-type"),
        ("time_min=60", "did you mean 'cluster.time_min'"),
    ],
)
def test_the_words_of_sbatch_lead_to_their_keys(written: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, [written], site=False)


def test_the_error_names_file_and_line_and_what_it_says_to_write_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: x\ncluster:\n  account: 0755\n")
    with pytest.raises(ConfigError, match=r"c\.yaml, line 3: cluster\.account: .*; quote it: account: '0755'"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"quote it: 'cluster\.account=\"0755\"'"):
        load_config(None, ["cluster.account=0755"])
    assert load_config(None, ['cluster.account="0755"']).cluster.account == "0755"


def test_the_rest_of_an_argument_is_no_comment() -> None:
    with pytest.raises(ConfigError, match="'# 3' is a comment to YAML; put quotes around the value"):
        load_config(None, ["cluster.extra.comment=job # 3"])
    with pytest.raises(ConfigError, match="'#3' is a comment to YAML"):
        load_config(None, ["cluster.account=#3"])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "- " * 10_000, "a: &x {b: *x}", "a: &x {<<: *x}", "optim: {lr: 1, lr: 2}", "a\0b: 1"]
)
def test_yaml_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(tmp_path / "c.yaml")


def test_merged_mappings_and_anchors_are_read_in_no_time(tmp_path: Path) -> None:
    lines = ["optim: &a0 {lr: 0.25}", *(f"x{n}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}" for n in range(40))]
    (tmp_path / "c.yaml").write_text("\n".join([*lines, "train: {<<: *a40}"]))
    with pytest.raises(ConfigError, match="x0: unknown key"):
        load_config(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("cluster: {extra: {<<: {comment: a, nice: 1}, comment: b}}")
    assert load_config(tmp_path / "c.yaml").cluster.extra == {"nice": 1, "comment": "b"}


def test_a_reference_stands_for_another_value() -> None:
    momentum = "optim.momentum=${optim.lr}"
    config = load_config(None, [momentum, "optim.lr=0.9", "cluster.account=p${train.seed}", "cluster.qos=${name}"])
    assert (config.optim.momentum, config.cluster.account, config.cluster.qos) == (0.9, "p0", "run")


def test_a_backslash_makes_a_reference_text() -> None:
    assert load_config(None, [r"cluster.account=\${X}"]).cluster.account == "${X}"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${nowhere}", "Interpolation key 'nowhere' not found"),
        ("${", r"write \${ for a text"),
        ("${cluster.account}", "ecursive"),
        ("${optim}", "must be text"),
        ("???", "still to be given"),
    ],
)
def test_a_reference_to_nothing_is_refused_by_the_key(value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"cluster.account={value}"])
    assert str(caught.value).startswith("cluster.account: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("value", ["${oc.env:TOKEN}", "x${oc.decode:${oc.env:TOKEN,null}}", r"\\${oc.env:TOKEN}"])
def test_an_environment_variable_is_not_written_into_a_run(
    load: Load, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    with pytest.raises(ConfigError, match=r"cluster\.account: .* is refused.*key=\$VARIABLE") as caught:
        load("cluster.account", value)
    assert "hunter2" not in str(caught.value)


TEXTS = st.one_of(
    st.text(max_size=12).filter(lambda text: text != "???"),  # stands for a value that is still to be given
    st.text(alphabet="\\${}? ", max_size=8).filter(lambda text: text != "???"),
    st.sampled_from(
        ["no", "0755", "16:00", "1e3", "1.10", "1_000", "0o17", "0x1f", "null", "~", "<<", "=", "2026-01-01"]
    ),
    st.sampled_from(["<<", "=", "2026-01-01", "${X}", "\\${oc.env:X}", ".inf", "", "a\x85b", " a\n b\n"]),
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    types.NoneType: st.none(),
    Any: st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans()),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=8), values_of(get_args(hint)[1]), max_size=3)
    kinds = [] if hint is Any else get_args(hint)
    return st.one_of(*map(values_of, kinds)) if kinds else SCALARS[hint]


def section_of(config: JobConfig, key: str) -> Any:
    section = key.rpartition(".")[0]
    return value_of(config, section) if section else config


@st.composite
def configs(draw: st.DrawFn) -> JobConfig:
    """Draw a config with other values than the defaults at some keys."""
    config = JobConfig()
    for key in draw(st.lists(st.sampled_from(all_keys()), min_size=1, max_size=8)):
        section, leaf = section_of(config, key), key.rpartition(".")[2]
        setattr(section, leaf, draw(values_of(get_type_hints(type(section))[leaf])))
    return config


@settings(max_examples=30, deadline=None)
@given(configs())
def test_what_is_written_reads_back_equal_and_means_the_same_to_other_readers(
    tmp_path_factory: pytest.TempPathFactory, config: JobConfig
) -> None:
    """The other reader is PyYAML, of YAML 1.1. It sees the mark before a `${` that is text."""
    path = tmp_path_factory.getbasetemp() / "there-and-back.yaml"
    text = dump_config(config)
    path.write_text(text, encoding="utf-8")
    assert repr(load_config(path, site=False)) == repr(config)  # also 1 is not 1.0, and 0.0 is not -0.0
    assert without_marks(yaml.load(text, yaml.CSafeLoader)) == without_marks(asdict(config))


def without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_marks(item) for item in value]
    return value.replace("\\", "") if isinstance(value, str) and "${" in value else value


def test_every_key_reads_back_equal(tmp_path: Path) -> None:
    texts = dict.fromkeys(all_keys(), "no ${X} \\${Y} 0755")
    config = JobConfig()
    for key, text in texts.items():
        section, leaf = section_of(config, key), key.rpartition(".")[2]
        hint = get_type_hints(type(section))[leaf]
        if get_origin(hint) in (list, dict):
            # YAML, or a reference to the environment, could read each of these in another way
            values: Any = {"${a}.0755": text, "b": "no"} if get_origin(hint) is dict else [text, "0755"]
            held = get_args(hint)[-1]
            if held is float:
                values = [0.5, -0.0]
            elif get_origin(held) is dict:
                values = {"${a}.0755": values, "b": {}} if get_origin(hint) is dict else [{"b": text}, {}]
            setattr(section, leaf, values)
        elif str in (get_args(hint) or [hint]):
            setattr(section, leaf, text)
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(config))
    assert load_config(path, site=False) == config
