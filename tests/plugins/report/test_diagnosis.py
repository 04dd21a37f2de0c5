"""The end of one log. Which line counts, from which rank it is, and how little is read."""

import dataclasses
import io
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import get_type_hints

import pytest

from tests import gold
from tests.bench.page import filled
from toolkit.base.tracebacks import TAIL_BYTES, tail_of_file, tail_of_stream
from toolkit.config.schema import JobConfig
from toolkit.plugins.report.why.diagnosis import (
    Diagnosis,
    all_rules,
    cause_of_file,
    cause_of_text,
    cause_or_exception,
    rule,
)
from toolkit.plugins.report.why.page import last_lines

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RESET = "RuntimeError: [3] is setting up NCCL: Connection reset by peer"


def the_cause(log: str | Path) -> Diagnosis:
    found = cause_of_file(log) if isinstance(log, Path) else cause_of_text(log)
    assert found is not None
    return found


def named(text: str) -> str | None:
    found = cause_of_text(text)
    return found.rule if found else None


def test_the_cause_counts_and_not_what_follows_from_it() -> None:
    assert named(f"{RESET}\n{OOM}\nsrun: error: n1: task 0: Exited with exit code 1") == "cuda.oom"
    assert named(f"{OOM}\n{RESET}") == "cuda.oom"


def test_a_secondary_rank_says_that_another_rank_is_the_cause() -> None:
    found = the_cause(RESET)
    assert found.rule == "peer.closed"
    assert found.is_consequence
    assert found.to_json()["is_consequence"] is True


def test_of_two_errors_of_one_tier_the_earlier_counts() -> None:
    assert named("KeyError: 'a'\nIndexError: list index out of range") == "py.key"
    assert named("IndexError: list index out of range\nKeyError: 'a'") == "py.index"


def test_an_error_before_many_later_steps_did_not_end_the_job() -> None:
    steps = [f"step {number}/900 loss 1.9{number}" for number in range(8)]
    assert named("\n".join([OOM, *steps])) is None
    assert named("\n".join([*steps, OOM])) == "cuda.oom"


def test_ordinary_and_empty_logs_have_no_cause() -> None:
    assert named("") is None
    assert named("step 1 loss 2.0\ncompleted after 400 steps\n") is None


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (f"[rank3]: {OOM}", 3),
        (f"[default3]:{OOM}", 3),
        (f"[1,3]<stderr>:{OOM}", 3),
        (f"3: {OOM}", 3),
        (OOM, None),
    ],
)
def test_the_rank_is_told_from_the_launchers_label(line: str, rank: int | None) -> None:
    found = the_cause(f"{line}\n")
    assert (found.rank, found.line) == (rank, OOM)


def test_the_host_is_told_from_a_line_of_srun() -> None:
    found = the_cause("srun: error: node7: task 12: Out Of Memory")
    assert (found.rule, found.host) == ("host.oom_kill", "node7")


def test_the_frame_is_the_users_own_and_not_a_librarys() -> None:
    found = the_cause(
        "Traceback (most recent call last):\n"
        '  File "/w/jobs/mine.py", line 42, in forward\n    x = self.up(x)\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in _call_impl\n'
        f"{OOM}\n"
    )
    assert found.where == "mine.py:42 in forward"


def test_colours_carriage_returns_and_any_bytes_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\xff\xfe\x00\x80 junk\r 10%|#\r\x1b[31m" + OOM.encode() + b"\x1b[0m\r\n\xc3\x28")
    found = the_cause(log)
    assert (found.rule, found.line, found.log) == ("cuda.oom", OOM, str(log))


def test_of_a_huge_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with log.open("wb") as file:
        file.write(b"KeyError: 'a'\n")
        os.truncate(log, 10 << 30)  # a hole: no disk holds it
        file.seek(0, os.SEEK_END)
        file.write(OOM.encode())
    assert len(tail_of_file(log)) == TAIL_BYTES
    assert the_cause(log).rule == "cuda.oom"


class Pipe(io.BytesIO):
    """A stream that cannot seek."""

    def seekable(self) -> bool:
        return False


def test_of_a_pipe_the_end_is_kept() -> None:
    assert tail_of_stream(Pipe(b"x" * (3 * TAIL_BYTES) + b"the end")).endswith("the end")
    assert len(tail_of_stream(Pipe(b"x" * (3 * TAIL_BYTES)))) == TAIL_BYTES


def test_a_hit_deep_in_a_long_line_is_shown() -> None:
    found = the_cause("x" * 1500 + OOM)
    assert OOM[:30] in found.line
    assert len(found.line) <= 300


def test_last_lines_leave_out_empty_ones() -> None:
    assert last_lines("a\n\n b \r\n\n\x1b[1mc\n\n", 2) == [" b", "c"]


def test_a_plain_error_is_its_own_cause_with_its_line() -> None:
    log = (
        "step 1 loss 2.0\nTraceback (most recent call last):\n"
        '  File "/home/ann/train.py", line 7, in <module>\n    main()\n    ^^^^^^\n'
        '  File "/home/ann/train.py", line 4, in main\n    raise ValueError("width must be even")\n'
        "ValueError: width must be even\n"
    )
    found = cause_or_exception(log)
    assert (found.cause, found.where, found.rule) == (
        "ValueError: width must be even",
        "train.py:4 in main",
        "py.exception",
    )
    # A peer's end, which other ranks report, is no cause; nor is an error that the training went on after.
    peers = "[rank1]: RuntimeError: Connection closed by peer [10.0.0.1]:3\n"
    assert getattr(cause_or_exception(peers + log), "cause", None) == found.cause
    handled = log + "".join(f"step {number} loss 2.0\n" for number in range(9))
    assert cause_or_exception(handled) is None
    # Of a chain it is the last one, as the program has put it.
    first = log.replace("width must be even", "inner")
    chained = (
        f"{first}\nDuring handling of the above exception, another exception occurred:\n\n{log.partition(chr(10))[2]}"
    )
    assert getattr(cause_or_exception(chained), "cause", None) == found.cause
    assert cause_or_exception("usage: x\nerror: no such file\n") is None


def test_a_rule_that_knows_more_comes_before_the_exceptions_text() -> None:
    log = "Traceback (most recent call last):\n  File \"/a/train.py\", line 7, in f\n    g()\nKeyError: 'labels'\n"
    assert getattr(cause_or_exception(log), "rule", None) == "py.key"


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
    page = filled((ROOT / "docs/why-causes.md").read_text())
    assert [known.id for known in RULES if f"| `{known.id}` | {known.cause} | {known.next} |" not in page] == []
