"""Every key of a config with odd values. Each is refused by name, or accepted, written and read back equal."""

import re
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.house.fuzz.harness import ACCEPTED, CLEAR, COUNTS, SilentError, fuzz, seclude
from toolkit.base.errors import RequestError
from toolkit.config import all_keys, dump_config, load_config, validate
from toolkit.run.submission import submit

NUMBERS = [
    *("0", "-0", "-1", "1", "2", "3", "7", "1.5", "-1.5", "1e3", "1e308", "1e999", "-1e999", ".inf", "-.inf"),
    *(".nan", "NaN"),
    *("10000000000000000000000", "-99999999999", "0x10", "0o17", "017", "1_000", "1:30", "24:00:00", "0.1e-400", "+5"),
    *("9" * 400, "9" * 5000, "1." + "0" * 400, "2147483648", "9223372036854775808"),
]
WORDS = [
    *("", "null", "~", "true", "false", "yes", "no", "on", "off", "y", "x", "auto", "none", "None", "ddp"),
    *("fsdp", "epoch"),
    *("tensor", "pipeline", "dp", "custom", "local_sgd", "parameter_server", "topk", "powersgd", "int8", "bf16"),
    *("fp16",),
    *("nccl", "gloo", "mpi", "skip", "blocks", "hash", "diloco", "interleaved", "cosine", "adamw", "eval/accuracy"),
    *("a b", " a", "a ", "'", '"', "'a'", '"a"', "[", "]", "{", "}", "[]", "{}", "[1, 2]", "[a]", "[null]"),
    *("[[]]", "[''"),
    *("{a: 1}", "{a: {b: [1]}}", "{1: 2}", "{null: 1}", "{a: null}", "&a b", "*a", "!!python/object:x"),
    *("!!int x", "<<: 1"),
    *("|", ">", "- a", "a: b", "a: b: c", "#", "a # b", "@a", "`a`", "%a", "%j", "\\", "\\n", "a\\", "${"),
    *("${}", "${x}", "\\${x}"),
    *("${optim.lr}", "${name}", "${oc.env:HOME}", "${oc.env:NO_SUCH}", "$(touch x)", "${A:=b}", "???", "a\tb"),
    *("a\nb", "\x01"),
    *("\u00e9\u4e2d\u6587", "\U0001f600", "\udcff", "\ufeffa", "\u2028", "../..", "/", "/proc/self/mem", "~"),
    *("~nobody/x", "~no.such.user/x", "a/../b"),
    *("node[1-", "n[1-3]", "n[3-1]", "n1,n2,,", "--wrap", "-x", "=", "==", "a=b", ",", ";", "a;b", "&&"),
    *("x" * 300, "x" * 70_000),
    *("jobs.classify", "jobs.nothing", "jobs", "sys", "os.path", "1.2", "..", ".a", "a."),
    *("toolkit.nodes.start.user_script", "encodings"),
    *("2026-01-01", "2026-01-01T00:00:00Z", "0755", "1.10", "1e5", "docker://x", "x.sqsh", "[" * 300, "{a: " * 200),
]
ODD = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seclude(monkeypatch, tmp_path)


JOB = """
from dataclasses import dataclass, field
from typing import Literal

@dataclass
class Sub:
    size: float | None = None
    words: dict[str, str] = field(default_factory=dict)

@dataclass
class Params:
    width: int = 3
    kind: Literal["a", 2] = "a"
    text: str = ""
    flag: bool = False
    sizes: list[int] = field(default_factory=list)
    pair: tuple[float, str] = (1.0, "")
    either: int | list[bool] = 1
    sub: Sub = field(default_factory=Sub)

def main(config): print(config)
"""
OWN = [f"params.{key}" for key in ("width", "kind", "text", "flag", "sizes", "pair", "either", "sub")]
OWN += ["params.sub.size", "params.sub.words", "params.sub.words.a", "params.no", "params"]


def names_a_key(text: str, key: str) -> bool:
    """True if ``text`` names the key, or another key that does not go with it."""
    own = key.rpartition(".")[2]
    return (own != "" and own in text) or any(re.search(rf"\b{re.escape(other)}\b", text) for other in all_keys())


def refused(error: RequestError, names: bool) -> str:
    if not names:
        raise SilentError(f"neither file nor key is named: {error}")
    return CLEAR


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("count", COUNTS)
def test_every_key_takes_a_value_that_reads_back_equal_or_refuses_it_by_name(count: int, tmp_path: Path) -> None:
    pairs = st.lists(st.tuples(st.sampled_from([*all_keys(), *OWN]), ODD), min_size=1, max_size=2)
    written = tmp_path / "written.yaml"
    job = tmp_path / "job.py"
    job.write_text(JOB)

    def check(case: list[tuple[str, str]]) -> str:
        overrides = [f"job={job}", *(f"{key}={value}" for key, value in case)]
        try:
            config = load_config(None, overrides)
        except RequestError as error:
            return refused(error, any(names_a_key(str(error), key) for key, _ in case))
        written.write_text(dump_config(config), encoding="utf-8")
        again = load_config(written, site=False)  # compared as text: .nan is not equal to itself
        assert dump_config(again) == dump_config(config), "it does not read back equal"
        try:
            validate(config)
        except RequestError as error:
            return refused(error, any(names_a_key(str(error), key) for key, _ in case))
        return ACCEPTED

    fuzz("config values", pairs, check, 2 * count)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("count", COUNTS)
def test_an_odd_file_is_refused_by_its_name_or_its_dry_run_is_printed(count: int, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    keys = st.sampled_from([*all_keys(), "strategy", "cluster", "x", "data.x", "", "extends"])
    lines = st.lists(st.tuples(keys, ODD), max_size=3)
    odd_files = [b"", b"- a", b"a", b"a: &a [*a]", b"\xff\xfe", b"name: x\nname: y\n"]
    whole = st.one_of(st.binary(max_size=60), st.sampled_from(odd_files))

    def check(case: bytes | list[tuple[str, str]]) -> str:
        text = case if isinstance(case, bytes) else "".join(map(_nested, case)).encode(errors="surrogateescape")
        file.write_bytes(text)
        try:
            submit.dry_run(file, executor="local")
            submit.dry_run(file, executor="slurm")
        except RequestError as error:
            return refused(error, file.name in str(error) or names_a_key(str(error), ""))
        return ACCEPTED

    fuzz("config files", st.one_of(lines, lines, lines, whole), check, count)


def _nested(pair: tuple[str, str]) -> str:
    """Return ``a.b`` and a value as lines of YAML."""
    *above, last = pair[0].split(".")
    heads = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(above))
    return f"{heads}{'  ' * len(above)}{last}: {pair[1]}\n"
