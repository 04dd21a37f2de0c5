"""Keys of a job's own: read from its source, and strict like all others."""

import ast
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.config.conftest import ROOT
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import dump_config, filled, leaves, load_config, validate
from toolkit.config.params import dataclass_in, declared, defaults_of
from toolkit.config.source import read_source
from toolkit.constraints import hints_of, text_of

HEAD = """from __future__ import annotations
import dataclasses as dc
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, Optional
import no_such_module
"""
JOB = f"""{HEAD}
class Colour(Enum):
    RED = 1
    BLUE = 2

@dataclass
class Block:
    heads: int = 4
    #: what is dropped,
    #: of each block
    dropout: float | None = None

@dc.dataclass
class Params:
    width: int  # of a layer  # noqa: E501
    lr: float = 1
    act: Literal["relu", "gelu"] = "gelu"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    pair: tuple[int, float] = (1, 2)
    colour: Colour = Colour.RED
    kernel: "int | list[int]" = 3
    prompt: Optional[str] = None
    plan: dict[str, float] = field(default_factory=dict)
    block: Block = field(default_factory=Block)
    last: Block = field(default_factory=lambda: Block(heads=8))
    long: int = field(
        default=1,  # over several lines
    )
    KINDS: ClassVar[int] = 3
    made: int = field(init=False, default=0)

def main(config): print(config)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(JOB)
    (tmp_path / "c.yaml").write_text("job: ./train.py\nparams: {width: 64, block: {heads: 2}}\n")
    return tmp_path / "c.yaml"


def of_text(text: str, folder: Path) -> Any:
    (folder / "read.py").write_text(text)
    return dataclass_in(read_source(folder / "read.py"), "Params")


def test_a_config_has_every_key_of_its_job_resolved(job: Path) -> None:
    config = load_config(job, ["params.lr=${optim.lr}", "params.kernel=[3, 5]", "params.plan={a.b: 2}"])
    expected = {
        "width": 64,
        "lr": 0.05,
        "act": "gelu",
        "sizes": [1, 2],
        "pair": [1, 2.0],
        "colour": "RED",
        "kernel": [3, 5],
        "prompt": None,
        "plan": {"a.b": 2.0},
        "block": {"heads": 2, "dropout": None},
        "last": {"heads": 8, "dropout": None},
        "long": 1,
    }
    assert repr(config.params) == repr(expected)  # 1 is not 1.0
    validate(config)
    written = job.with_name("written.yaml")
    written.write_text(dump_config(config))
    assert load_config(written) == config
    job.with_name("train.py").unlink()
    assert load_config(written, site=False) == config, "what a run keeps needs no job"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("params.widht=3", "params.widht: unknown key; did you mean 'params.width'? valid here: act, block, colour"),
        ("params.block.head=3", "params.block.head: unknown key; did you mean 'params.block.heads'? valid here: "),
        ("arg.width=3", "arg: unknown key; did you mean 'args'? valid here: "),
        ("width=3", "width: unknown key; a key of the job's own is params.width; valid here: "),
        ("params.width=a", "params.width: 'a' is text; must be a whole number"),
        ("params.width=1.5", "params.width: '1.5' is a number; must be a whole number"),
        ("params.width=null", "params.width: is empty (null); must be a whole number"),
        ("params.width=[1]", "params.width takes a whole number, not a list or a mapping"),
        ("params.width=${name}", "params.width: ${name} stands for 'c'; must be a whole number"),
        ("params.act=rely", "params.act: unknown value 'rely'; did you mean 'relu'? valid: relu, gelu"),
        ("params.colour=GREEN", "params.colour: unknown value 'GREEN'; did you mean 'RED'? valid: RED, BLUE"),
        ("params.act=${name}", "params.act: unknown value 'c'; valid: relu, gelu"),
        ("params.sizes=[1, a]", "params.sizes[1]: 'a' is text; must be a whole number"),
        ("params.sizes=3", "params.sizes is a list: [first, second]"),
        ("params.pair=[1]", "params.pair: takes 2 items, not 1"),
        ("params.kernel={a: 1}", "params.kernel takes a whole number, not a list or a mapping"),
        ("params.plan.layer.0=1", "params.plan.layer takes a number, not a list or a mapping"),
        ("params.block=3", "params.block is a section: give it keys, such as params.block.heads"),
        ("params=3", "params is a section: give it keys, such as params.width"),
        ("params.prompt=${oc.env:HOME}", "params.prompt: ${oc.env:HOME} is refused: "),
    ],
)
def test_a_wrong_key_of_the_jobs_own_is_refused_like_any_other(override: str, says: str, job: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(job, [override])
    assert str(caught.value).removeprefix(f"argument {override!r}: ").startswith(says)


def test_a_resume_checks_keys_of_its_own_by_the_runs_own_sources(job: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(load_config(job)))
    code = tmp_path / "code"
    code.mkdir()
    job.with_name("train.py").rename(code / "train.py")
    resumed = load_config(config, ["params.width=3", "params.block.heads=1"], site=False, project=code)
    assert (resumed.params["width"], resumed.params["block"]["heads"]) == (3, 1)
    with pytest.raises(ConfigError, match=r"params\.widht: unknown key"):
        load_config(config, ["params.widht=3"], site=False, project=code)


def test_a_wrong_value_in_a_file_names_the_line(job: Path) -> None:
    job.write_text("job: train.py\nparams:\n  width: wide\n")
    with pytest.raises(ConfigError, match=r"c\.yaml, line 3: params\.width: 'wide' is text"):
        load_config(job)


def test_a_key_without_default_is_asked_for(job: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.width: must be given, for .*train\.py, line 21 has no default"):
        load_config("train.py")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "def main(config): print(config)",
            r".*train\.py declares no keys of its own; write `@dataclass` and `class Params:`",
        ),
        (
            "class Params:\n  width: int = 3\ndef main(config): print(config)",
            r"class Params \(.*train\.py, line 1\) is not a dataclass; write",
        ),
        (
            "from models import Params\ndef main(config): print(config)",
            r".*train\.py imports Params, and its keys must be known without importing it",
        ),
    ],
)
def test_a_job_without_params_says_how_to_declare_them(text: str, says: str, job: Path) -> None:
    job.with_name("train.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"c\.yaml, line 2: params: {says}"):
        load_config(job)
    job.write_text("job: train.py\nparams: {}\n")
    assert load_config(job).params == {}


def test_a_foreign_script_has_no_params() -> None:
    with pytest.raises(ConfigError, match=r"params: a script that knows nothing of the toolkit has none"):
        load_config(None, ["params.width=3", "job=toolkit.nodes.start.user_script"])


def test_a_job_that_is_not_there_is_named_where_params_need_it(job: Path) -> None:
    with pytest.raises(ConfigError, match=r"job: there is no file .*gone\.py; did you mean 'train\.py'\?"):
        load_config(job, ["job=gone.py"])
    assert load_config(None, ["job=gone.py"]).params == {}, "without them that is for validate"


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        ("width: int = compute()", 3, "needs compute, and only the constants, enums and dataclasses of this file are"),
        ("width: int = WIDE", 3, "needs WIDE, and only"),
        ("width: int = CHANGED", 3, "needs CHANGED"),
        ("width: int = FILLED[0]", 3, "needs FILLED"),
        ("sizes: list[int] = field(default_factory=lambda: list(FILLED))", 3, "needs FILLED"),
        ("sizes: List", 3, "a config cannot hold the type List"),
        ("width: InitVar[int] = 3", 3, "a config cannot hold the type InitVar[int]"),
        ("width: int = 1 // 0", 3, "ZeroDivisionError: integer division or modulo by zero"),
        ("width: int = 'a'", 3, "the default 'a' does not fit its type int"),
        ("width: int = True", 3, "the default True does not fit its type int"),
        ("lr: float = None", 3, "the default None does not fit its type float"),
        ("pair: tuple[int, int] = (1, 2, 3)", 3, "the default (1, 2, 3) does not fit its type tuple[int, int]: it"),
        ("act: Literal['a', 'b'] = 'c'", 3, "the default 'c' does not fit its type 'a' | 'b'"),
        ("net: torch.nn.Module", 3, "a config cannot hold the type torch.nn.Module; there are int, float"),
        ("sizes: list", 3, "a config cannot hold the type list"),
        ("sizes: list[int] = [1]", 1, "ValueError: mutable default <class 'list'> for field sizes is not allowed"),
        ("sizes: list[int] = field(default_factory=make)", 3, "needs make, and only"),
        ("sub: Sub = 3", 3, "the default 3 does not fit its type Sub"),
        ("sub: Sub = field(default_factory=lambda: Sub(y=1))", 3, "TypeError: Sub.__init__() got an unex"),
        ("subs: list[Sub]", 3, "list[Sub]: a dataclass is a section of its own, not in a list or with |"),
        ("sub: Sub | None = None", 3, "Sub | None: a dataclass is a section of its own"),
        ("again: Params", 2, "Params contains itself"),
        ("a: int = 1\n  b: int", 1, "TypeError: non-default argument 'b' follows default argument"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_known_without_the_rest_of_the_file_is_refused(
    body: str, line: int, says: str, tmp_path: Path
) -> None:
    head = "from dataclasses import dataclass, field, InitVar; from typing import List, Literal"
    text = f"@dataclass\nclass Params:\n  {body}\n\n@dataclass\nclass Sub:\n  x: int = 1\nWIDE = 3\n{CHANGES}{head}\n"
    with pytest.raises(ConfigError) as caught:
        of_text(text, tmp_path)
    assert str(caught.value).startswith(f"params: {tmp_path / 'read.py'}, line {line}: {says}")


def test_a_base_from_elsewhere_is_refused_and_one_of_the_file_is_read(tmp_path: Path) -> None:
    own = (
        f"{HEAD}\n@dataclass\nclass Base:\n  a: int = 1\n  b: int = 2\n@dataclass\nclass Params(Base):\n  a: int = 3\n"
    )
    assert defaults_of(of_text(own, tmp_path), None) == {"a": 3, "b": 2}
    with pytest.raises(ConfigError, match=r"line 8: needs mine, and only the constants, enums and dataclasses"):
        of_text(f"{HEAD}@dataclass\nclass Params(mine.Base):\n  a: int = 3\n", tmp_path)


def test_a_type_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    text = (
        f"{HEAD}Size = int | None\nSizes: TypeAlias = list[Size]\n@dataclass\nclass Params:\n  a: Sizes\n  b: Round\n"
    )
    with pytest.raises(ConfigError, match=r"needs Round, and only the constants"):
        of_text(f"{text}Round = Round\n", tmp_path)
    assert text_of(hints_of(of_text(text.replace("  b: Round", ""), tmp_path))["a"]) == "list[int | None]"


CHANGES = "CHANGED = 8\nif WIDE: CHANGED = 16\nFILLED = []\nFILLED.append(3)\n"
COMPUTED = """import math, no_such_module
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Literal, Optional

class Precision(Enum):
    BF16 = no_such_module.bfloat16
    FP32 = no_such_module.float32

class Kind(StrEnum):
    SMALL = auto()
    LARGE = no_such_module.large()

HEADS = 4
WIDTH = 2**4 * HEADS
sgd = no_such_module.SGD

@no_such_module.registered
@dataclass(kw_only=True)
class Params:
    width: int = WIDTH
    scale: float = 1 / math.sqrt(WIDTH)
    DTYPE = no_such_module.bfloat16
    LEAST = 2
    optimizer: "Literal['sgd', 'a b']" = "sgd"
    precision: Precision = Precision.FP32
    kind: "Optional['Kind']" = Kind.LARGE
    rate: float = field(default=0.1 * LEAST, metadata={"help": no_such_module.text})
    depth: int

    @no_such_module.cached
    def area(self): return self.width * self.depth
"""


def test_a_default_may_be_computed_from_constants_of_the_file(tmp_path: Path) -> None:
    expected = {"width": 64, "scale": 0.125, "optimizer": "sgd", "precision": "FP32", "kind": "LARGE", "rate": 0.2}
    expected["depth"] = None
    assert defaults_of(of_text(COMPUTED, tmp_path), None) == expected


def test_the_comment_and_the_type_of_a_key_are_known(tmp_path: Path) -> None:
    params = of_text(JOB, tmp_path)
    facts = {
        name: (text_of(hint), declared(params.__dataclass_fields__[name]).comment)
        for name, hint in hints_of(params).items()
    }
    assert facts["width"] == ("int", "of a layer")
    assert facts["act"] == ("'relu' | 'gelu'", "")
    assert facts["kernel"] == ("int | list[int]", "")
    assert facts["prompt"] == ("str | None", "")
    assert facts["long"] == ("int", "over several lines")
    assert "KINDS" not in facts
    block = hints_of(params)["block"].__dataclass_fields__["dropout"]
    assert declared(block).comment == "what is dropped, of each block"


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(10**20), 10**20),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "str": WORDS,
    "Literal['a', 2, None]": st.sampled_from(["a", 2, None]),
}


@st.composite
def annotated(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a type, and the source text of its default."""
    kind = draw(st.sampled_from(sorted(SCALARS)))
    value = SCALARS[kind]
    form = draw(st.sampled_from(["{}", "{} | None", "Optional[{}]", "list[{}]", "tuple[{}, ...]", "dict[str, {}]"]))
    text = form.format(kind)
    if "None" in form or "Optional" in form:
        return text, repr(draw(st.one_of(st.none(), value)))
    if form == "{}":
        return text, repr(draw(value))
    if form.startswith("tuple"):
        return text, repr(tuple(draw(st.lists(value, max_size=3))))
    items = draw(st.dictionaries(WORDS, value, max_size=3) if form.startswith("dict") else st.lists(value, max_size=3))
    return text, f"field(default_factory=lambda: {items!r})"


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    sys.modules.pop("of_hypothesis", None)


@pytest.mark.usefixtures("forgotten")
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(annotated(), st.booleans()), min_size=1, max_size=6))
def test_defaults_read_from_the_source_are_those_of_the_class_itself(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[tuple[str, str], bool]]
) -> None:
    """The config is written and read again. A rank's object then equals what Python makes of the class."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for number, ((kind, default), is_nested) in enumerate(drawn):
        lines[is_nested].append(f"  f{number}: {kind} = {default}")
    head = HEAD.replace("import no_such_module\n", "")
    sub = "\n".join(["@dataclass", "class Sub:", *lines[True], "  pass"])
    own = "\n".join(["@dataclass", "class Params:", *lines[False], "  sub: Sub = field(default_factory=Sub)"])
    path = tmp_path_factory.getbasetemp() / "of_hypothesis.py"
    path.write_text(f"{head}{sub}\n{own}\n", encoding="utf-8")
    module = sys.modules["of_hypothesis"] = ModuleType("of_hypothesis")
    exec(compile(ast.parse(path.read_bytes()), path, "exec"), module.__dict__)
    config = load_config(path)
    written = path.with_suffix(".yaml")
    written.write_text(dump_config(config), encoding="utf-8")
    assert filled(module.Params, load_config(written, site=False).params) == module.Params()
    assert filled(module.Params, {}) == module.Params()


def test_an_object_is_filled_with_tuples_members_and_dataclasses(job: Path) -> None:
    module = ModuleType("of_job")
    sys.modules["of_job"] = module
    exec(JOB.replace("import no_such_module\n", ""), module.__dict__)
    params = filled(module.Params, load_config(job).params)
    assert (params.pair, params.colour, params.block) == ((1, 2.0), module.Colour.RED, module.Block(2))
    assert params == module.Params(width=64, block=module.Block(2), last=module.Block(8))
    with pytest.raises(ConfigError, match=r"params\.widht: unknown key; did you mean 'params\.width'\?"):
        filled(module.Params, {"widht": 3})
    with pytest.raises(ConfigError, match=r"params\.width: must be given, for Params has no default for it"):
        filled(module.Params, {})
    del sys.modules["of_job"]


def test_single_values_have_their_full_names() -> None:
    assert dict(leaves({"a": 1, "b": {"c": [2], "d": {"e": None}}})) == {
        "params.a": 1,
        "params.b.c": [2],
        "params.b.d.e": None,
    }


def test_texts_of_params_may_have_line_breaks_and_nothing_worse(job: Path) -> None:
    validate(load_config(job, ['params.prompt="a\\nb\\t"']))
    validate(load_config(job, ['params.prompt=""']))
    with pytest.raises(RequestError, match=r"params\.prompt: .* holds a line break or another control character"):
        validate(load_config(job, ['params.prompt="a\\0"']))


def test_params_that_lead_back_to_themselves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("params: &a {a: *a}\n")
    with pytest.raises(ConfigError, match="nests too deep"):
        load_config(path, site=False)


def test_numbers_that_are_no_numbers_are_params_as_well(job: Path) -> None:
    assert load_config(job, ["params.lr=.inf"]).params["lr"] == math.inf


def test_the_example_of_the_page_on_configs_is_read_as_it_says(job: Path) -> None:
    page = (ROOT / "docs/config.md").read_text()
    python, yaml = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    job.with_name("train.py").write_text(f"{python}\ndef main(config): print(config)\n")
    job.write_text(yaml)
    attention = {"heads": 4, "dropout": 0.1}
    expected = {"width": 512, "act": "gelu", "milestones": [30, 60], "attention": attention}
    assert load_config(job, ["params.width=512", "params.attention.dropout=0.1"]).params == expected
