"""What the pages say of equal bits after an interruption, and the test that proves it on three ranks or more.

A sum of two ranks has the same bits in any order, so two ranks would prove nothing.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLAIM = re.compile(r"bit for bit|same bits|same result|last bits", re.IGNORECASE)
_LOOPS = "dist/idioms/test_loops.py::test_a_loop_stopped_and_killed_at_random_steps_ends_as_undisturbed"
_TRAINER = "dist/test_trainer.py::test_a_run_killed_between_checkpoints_ends_bit_for_bit_like_the_undisturbed_one"
_KILLS = "dist/test_many_kills.py::test_a_run_killed_at_random_moments_ends_bit_for_bit_like_the_undisturbed_one"
_CONTRACT = (
    "dist/test_strategy_contract.py::test_training_continued_in_fresh_processes_has_the_bits_of_an_uninterrupted_one"
)
_RESUME_CHECK = (
    "dist/test_resume_check.py::test_a_killed_run_is_identical_with_batch_norm_dropout_augmentation_and_workers"
)
#: By page: words of the line, and the tests.
PROVED = {
    "README.md": {"continues from its last checkpoint, and ends with the same result": [_LOOPS, _TRAINER]},
    "docs/index.md": {"preempted there, and ends with the same result": [_LOOPS]},
    "docs/design-faults.md": {"100 of 100 runs on 4 ranks ended with the same bits": [_KILLS]},
    "docs/faq.md": {'**What does "the same result" mean?** Bit for bit the same weights': [_LOOPS, _CONTRACT]},
    "docs/integrations.md": {
        "bit for bit those of an uninterrupted run": [
            "dist/test_integrations.py::test_a_stopped_and_killed_script_ends_bit_for_bit_as_an_undisturbed_one"
        ]
    },
    "docs/job.md": {
        "proves that a killed run ends with the same bits": [_RESUME_CHECK],
        "a resumed run ends with the same bits": [_TRAINER],
    },
    "docs/loop.md": {
        "compares its result bit for bit with that of an uninterrupted run": [
            "dist/test_own_scripts.py::test_a_loop_that_is_stopped_and_killed_ends_bit_for_bit_as_an_undisturbed_one"
        ],
        "**Results** equal those of an uninterrupted run bit for bit": [
            "dist/test_ddp_buckets.py::test_a_killed_loop_sums_gradients_in_the_same_buckets",
            _LOOPS,
        ],
    },
    "docs/slow-links.md": {
        "a resume is exact, bit for bit, at a round's end and also inside a round": [
            "dist/test_local_sgd.py::test_a_run_killed_inside_a_round_ends_bit_for_bit_like_the_undisturbed_one"
        ],
        "a resume is exact, bit for bit |": [_CONTRACT],
        "bit for bit; on another number each rank starts from the mean": [_CONTRACT],
    },
    "docs/steps.md": {"A resume is exact, bit for bit: averages, counters and masks": [_CONTRACT]},
    "docs/strategies.md": {
        "bit for bit the results of an uninterrupted run": [_CONTRACT],
        "without this pass a resumed run would differ in the last bits": [
            "dist/test_resume_check.py::test_each_cure_is_missed"
        ],
    },
}
#: Lines with such words that claim nothing of a resume, or what only a device or a site can show.
OTHERS = {
    "docs/checkpoints.md": ["At each save the ranks compare, bit for bit"],
    "docs/data.md": ["equal up to rounding but not bit for bit"],
    "docs/gpu.md": [
        "gives exactly the same bits only",
        "powersgd with the same bits",
        "killed and ends with the same bits",
    ],
    "docs/hardware.md": ["two ranks over MPI, killed and continued bit for bit"],
    "docs/inference.md": ["outputs equal bit for bit"],
    "docs/large-models.md": ["must hold the same bits"],
    "docs/slow-links.md": ["must get the same bits"],
    "docs/strategies.md": ["the first weights are bit for bit", "The results stay the same, bit for bit"],
}
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_each_claim_of_equal_bits_has_a_test_on_three_ranks_or_more(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    known = [*PROVED.get(page, {}), *OTHERS.get(page, [])]
    assert [words for words in known if words not in text] == []
    for words in known:
        text = text.replace(words, "")
    assert CLAIM.findall(text) == [], (
        f"{page} has a claim that is not listed here: add words of its line to PROVED, with the test that proves it on "
        "three ranks or more (of a strategy: _CONTRACT), or to OTHERS if it claims nothing of a resume"
    )


@pytest.mark.parametrize(
    "test", sorted({test for page in PROVED.values() for tests in page.values() for test in tests})
)
def test_what_proves_a_claim_runs_on_three_ranks_or_more(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert f"def {name}(" in text
    assert re.search(
        r"RANKS\b.* = [34]|WORLD\b.* = [34]|run_ranks\([34]|[(\[]4,|node=3|choice\(\(3, 4\)\)|, 3\)|SUBJECTS|ranks=4",
        text,
    )
