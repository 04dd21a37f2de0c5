"""The rules by which `toolkit why` reads a log, against public log tails. The tails are a gold set."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from pathlib import Path
from typing import get_type_hints

import pytest

from tests import gold
from tests.bench.why import table
from toolkit.config.schema import JobConfig
from toolkit.plugins.report.why.diagnosis import all_rules, cause_or_exception, rule

ROOT = Path(__file__).parents[3]
RULES = all_rules()
#: The figures of the held-out log tails when they were last measured; `python -m tests.bench.why` prints them.
HELD_OUT_ACCURACY = 0.95
HELD_OUT_COVERAGE = 0.92


def test_the_gold_set_has_hundreds_of_cases_of_known_labels() -> None:
    cases = [case for part in gold.PARTS for case in gold.read(part)]
    assert len(cases) >= 500
    assert len({case.source for case in cases}) >= 400
    assert len({case.text for case in cases}) == len(cases)
    for case in cases:
        assert case.text.strip(), case
        assert re.fullmatch(r"ours|[\w.-]+/[\w.-]+#\d+", case.source), case
        assert case.label == gold.SILENT or rule(case.label), case


def test_no_thread_is_in_both_parts() -> None:
    seen, held_out = ({case.source for case in gold.read(part)} for part in gold.PARTS)
    assert seen & held_out == set()
    assert len(held_out) >= 60


def test_the_cases_that_rules_were_written_for_are_all_right() -> None:
    score = gold.score(gold.read("seen"))
    assert score.confusion == Counter()
    assert score.coverage == 1


def test_held_out_cases_are_as_right_as_when_they_were_measured() -> None:
    score = gold.score(gold.read("held_out"))
    assert score.accuracy >= HELD_OUT_ACCURACY, score.confusion
    assert score.coverage >= HELD_OUT_COVERAGE, score.confusion


def test_both_parts_together_are_right_in_95_of_100() -> None:
    score = gold.score([case for part in gold.PARTS for case in gold.read(part)])
    assert score.accuracy >= 0.95
    assert score.coverage >= 0.95


def test_ordinary_output_and_warnings_are_given_no_cause() -> None:
    silent = [case for part in gold.PARTS for case in gold.read(part) if case.label == gold.SILENT]
    assert len(silent) >= 30
    assert gold.score(silent).spoken == 0


@pytest.mark.parametrize("name", sorted(gold.succeeded()))
def test_the_log_of_a_job_that_ended_well_has_no_cause(name: str) -> None:
    log = gold.succeeded()[name]
    assert cause_or_exception(log) is None
    # So it is with each part that a reader may paste.
    lines = log.split("\n")
    assert not any(cause_or_exception("\n".join(lines[:end])) for end in range(1, len(lines), 5))
    assert not any(cause_or_exception("\n".join(lines[begin:])) for begin in range(1, len(lines), 5))


def test_every_rule_has_two_cases_a_cause_and_a_next_step() -> None:
    cases = Counter(case.label for part in gold.PARTS for case in gold.read(part))
    for known in RULES:
        assert cases[known.id] >= 2, known.id
        for sentence in (known.cause, known.next):
            assert re.fullmatch(r"\S.{10,}[.?]", sentence), known.id


def test_ids_differ_and_patterns_match_no_empty_line() -> None:
    assert len({known.id for known in RULES}) == len(RULES)
    for known in RULES:
        assert not any(pattern.search("\n\n") for pattern in known.lines), known.id


def test_keys_in_next_steps_are_keys_of_the_config() -> None:
    sections = {name: hint for name, hint in get_type_hints(JobConfig).items() if dataclasses.is_dataclass(hint)}
    named = [key for known in RULES for key in re.findall(r"`(\w+)\.(\w+)(?:=[^`]*)?`", known.next)]
    ours = [(section, key) for section, key in named if section in sections]
    assert len(ours) > 20
    for section, key in ours:
        assert key in {field.name for field in dataclasses.fields(sections[section])}, f"{section}.{key}"


def test_no_pattern_takes_long_on_a_megabyte_of_hostile_text() -> None:
    lines = ("NCCL WARN " * 200, "Error " * 330, "(" * 2000, "a" * 2000, "srun: error: " * 150, "[" + "1," * 990)
    text = ("\n".join(lines) + "\n") * (1_000_000 // sum(len(line) + 1 for line in lines))
    for known in RULES:
        start = time.process_time()
        for pattern in known.lines:
            pattern.search(text)
        assert time.process_time() - start < 2, known.id


def test_the_page_lists_every_rule() -> None:
    page = (ROOT / "docs/why-causes.md").read_text()
    assert table() in page, "write what `python -m tests.bench.why --table` prints into docs/why-causes.md"
