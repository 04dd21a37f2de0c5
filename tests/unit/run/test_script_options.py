"""What a follow-up job takes over from the batch script of the job before it."""

from typing import Any

import pytest

from toolkit.base.errors import SlurmError
from toolkit.config.cluster import FLAGS
from toolkit.run.requeue.follow_up import OF_ONE_JOB, TOLD_BY_JOB, options_in, script_lines

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train --nodes=2 -n 8 --gpus-per-node 4   # the size is told by the job
#SBATCH --segment=2 -k
#SBATCH --hint nomultithread --gres-flags=enforce-binding
#SBATCH -Scpu2
 #SBATCH --network=not-a-line-of-sbatch
##SBATCH --network=neither
#SBATCH --mail-ty=END,FAIL --mail-user="me@here"

#SBATCH --array=1-4 --dependency=afterok:7 --begin=now+1hour --hold -o out -D /tmp --export=NONE
#SBATCH --comment='it\\'s 2 words'
set -e
#SBATCH --bb=too-late
"""
#: As Slurm 22.05 and 24.11 print it.
SHOWN = """\
JobId=7 JobName=j.sh
   Priority=4294901752 Nice=9 Account=root QOS=normal
   OverSubscribe=OK Contiguous=1 Licenses=(null) Network=(null)
   Comment=two words
   Switches=1@00:05:00
   MailUser=me@here MailType=END
"""


class Controller:
    def __init__(self, script: str = "", shown: str = "") -> None:
        self.script, self.shown = script, shown

    def ask(self, argv: list[str]) -> str:
        return self.shown if argv[1] == "show" else self.script


def test_a_follow_up_job_gets_all_that_is_not_told_by_the_job_or_for_one_job() -> None:
    assert dict(options_in(SCRIPT)) == {
        "segment": "2",
        "no-kill": None,
        "hint": "nomultithread",
        "gres-flags": "enforce-binding",
        "core-spec": "cpu2",
        "mail-type": "END,FAIL",
        "mail-user": "me@here",
        "comment": "it's 2 words",
    }


def test_the_command_line_of_sbatch_goes_before_the_script() -> None:
    slurm: Any = Controller("#!/bin/sh\n#SBATCH --nice=1 --segment=2 --comment=one\n", SHOWN)
    wanted = {"--nice=9", "--segment=2", '--comment="two words"', "--switches=1@00:05:00", "--mail-type=END"}
    assert {*script_lines("7", slurm)} == {f"#SBATCH {option}" for option in wanted | {"--mail-user=me@here"}}


def test_what_is_written_is_read_back_as_it_was() -> None:
    slurm: Any = Controller("""#SBATCH --comment="a \\\\ b 'c' # d"\n""")
    assert dict(options_in("\n".join(script_lines("7", slurm)))) == {"comment": "a \\ b 'c' # d"}


def test_components_of_a_heterogeneous_job_have_lines_of_their_own() -> None:
    assert [*options_in("#SBATCH --hint=compute_bound\n#SBATCH hetjob\n#SBATCH --nice=2\n")] == []


def test_without_an_answer_a_follow_up_job_does_without(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        def ask(self, argv: list[str]) -> str:
            raise SlurmError("no answer")

    slurm: Any = Away()
    assert script_lines("7", slurm) == []
    assert "only the batch script has" in caplog.text


def test_each_flag_that_is_left_out_is_one_of_sbatch() -> None:
    assert FLAGS.keys() >= TOLD_BY_JOB | OF_ONE_JOB
