"""What `make test` runs of the tests with processes or a Slurm: each promise once. `make test-all` runs them all."""

from toolkit import registry

#: Strategies that have tests of their own instead of the contract's: one process with all GPUs of a node, a choice
#: between three of the others, and a step that the job makes.
BESIDE_THE_CONTRACT = {"dp", "auto", "custom"}
_RESUMED = "test_training_continued_in_fresh_processes_has_the_bits_of_an_uninterrupted_one"
_STRATEGIES = (*(name for name in registry.STRATEGIES if name not in BESIDE_THE_CONTRACT), "topk")
SMOKE = frozenset(
    {
        *(f"tests/dist/test_strategy_contract.py::{_RESUMED}[{strategy}]" for strategy in _STRATEGIES),
        "tests/dist/test_local_hangs.py::test_the_rank_that_is_behind_is_named_and_the_run_completes[stopped]",
        "tests/dist/test_local_runs.py::test_a_killed_rank_ends_the_attempt_and_the_next_one_resumes",
        "tests/dist/test_local_runs.py::test_a_resumed_run_continues_from_its_checkpoint_to_the_undisturbed_result",
        "tests/dist/test_memory.py::test_a_killed_run_goes_on_from_the_step_that_it_died_in[digits_ddp]",
        "tests/dist/test_own_loop.py::test_a_loop_of_any_kind_goes_on_bit_for_bit[ddp]",
        "tests/dist/test_own_loop.py::test_it_trains_as_the_same_loop_without_it",
        "tests/slurm/test_hang.py::test_the_rank_that_is_behind_is_named_with_its_node_and_the_run_completes"
        "[deadlocked worker]",
        "tests/slurm/test_main_job.py::test_a_rank_killed_in_mid_epoch_is_noticed_named_and_the_run_completes",
        "tests/slurm/test_stop.py::test_preempted_in_the_grace_time_it_commits_and_comes_back_with_nothing_lost",
        "tests/slurm/test_stop.py::test_where_preemption_cancels_a_follow_up_job_takes_over_without_any_message",
    }
)
