"""Host lists against scontrol itself: many random cases through a few processes."""

import json
import random
from collections.abc import Sequence

import pytest

from tests.box import Box
from toolkit.base.hostlist import compress, expand

pytestmark = pytest.mark.slurm

#: Runs where scontrol is: one interpreter, one scontrol for each case.
ASK = """
import json, subprocess, sys
what, cases = json.load(sys.stdin)
show = lambda case: subprocess.run(["scontrol", "show", what, case], capture_output=True, text=True).stdout
print(json.dumps([show(case) for case in cases]))
"""


def ask_scontrol(box: Box, what: str, cases: Sequence[str]) -> list[str]:
    answer = box.run(["python3", "-c", ASK], input=json.dumps([what, list(cases)])).stdout
    found: list[str] = json.loads(answer)
    return found


def random_range(dice: random.Random) -> str:
    low = str(dice.randint(0, 120)).zfill(dice.choice([1, 2, 3]))
    return dice.choice([low, f"{low}-{int(low) + dice.randint(0, 12)}"])


def random_entry(dice: random.Random) -> str:
    brackets = [",".join(random_range(dice) for _ in range(dice.randint(1, 3))) for _ in range(dice.randint(0, 3))]
    if not brackets:
        return f"host{dice.randint(0, 200)}"
    return dice.choice(["n", "rack", "a-b", "x1"]) + dice.choice(["", "-", "node"]).join(f"[{b}]" for b in brackets)


def random_list(dice: random.Random) -> str:
    return ",".join(random_entry(dice) for _ in range(dice.randint(1, 3)))


def random_hosts(dice: random.Random) -> list[str]:
    def host() -> str:
        number = dice.choice([dice.randint(0, 15), dice.randint(95, 110)])
        return dice.choice(["n", "n", "rack1-", "ab"]) + str(number).zfill(dice.choice([1, 2, 3]))

    hosts = [host() for _ in range(dice.randint(1, 9))] + dice.choice([[], ["login"]])
    return sorted(hosts) if dice.random() < 0.5 else hosts


def test_random_lists_expand_as_scontrol_expands_them(box: Box) -> None:
    dice = random.Random(1)
    cases = [random_list(dice) for _ in range(300)]
    answers = ask_scontrol(box, "hostnames", cases)
    assert [expand(case) for case in cases] == [answer.splitlines() for answer in answers]


def test_random_lists_are_compressed_as_scontrol_compresses_them(box: Box) -> None:
    dice = random.Random(2)
    cases = [random_hosts(dice) for _ in range(300)]
    answers = ask_scontrol(box, "hostlist", [",".join(case) for case in cases])
    assert [compress(case) for case in cases] == [answer.strip() for answer in answers]


def test_what_scontrol_calls_invalid_is_refused(box: Box) -> None:
    cases = ["n[3-1]", "n[a]", "n[]", "n[1,]", "n[-1]", "n[1.2]", "n[0-3:2]"]
    answers = ask_scontrol(box, "hostnames", cases)
    assert answers == [""] * len(cases)
    for case in cases:
        with pytest.raises(Exception, match="character"):
            expand(case)
