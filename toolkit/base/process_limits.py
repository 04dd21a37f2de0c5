"""How long this process waits for others, how often it looks, and how much it takes at once.

Times and sizes on which nothing else depends, and that no test must shorten, stand where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    """Times in seconds, sizes in bytes where their name says so. Raises ValueError where two do not fit each other."""

    # A controller that does not answer, or a full disk.
    retry_every_s: float = 2.0
    give_up_after_s: float = 300.0  #: a job waits no longer
    late_mount_s: float = 60.0  #: for checkpoints that were saved: a node may mount their file system late

    # The supervisor and its attempts.
    status_every_s: float = 0.5
    #: A run's files on the shared disk are written and looked at this often once an attempt has lasted
    #: ``files_often_s``: see `toolkit.files.polling`.
    files_every_s: float = 5.0
    watched_every_s: float = 1.0
    files_often_s: float = 60.0
    #: A status that is older makes a command ask Slurm whether the job is over. Shared folders show files seconds late.
    supervisor_quiet_s: float = 12.0
    supervisor_silent_s: float = 30.0  #: then the table of runs shows that the supervisor is silent
    #: Pause before a restart after an attempt that made no step. It doubles after each further one. A file system that
    #: is away for some seconds must not use up all restarts, which take only a second each.
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    #: After the first failure the others' error files and srun's lines are awaited: they tell the causes apart.
    error_reports_s: float = 0.5
    kill_again_s: float = 10.0
    dying_s: float = 1.0  #: ranks that got SIGKILL are gone then
    #: A rank that has not ended so long after a SIGKILL waits in the kernel, for a disk or a driver, perhaps for ever.
    unkillable_s: float = 60.0
    #: From the request to stop until the ranks are killed. They exit by themselves after FORCE_AFTER_S of
    #: ranks/session.py.
    stop_s: float = 150.0
    script_stop_s: float = 30.0  #: a user script has it after SIGTERM at least, where Slurm leaves that
    #: The controller answers with every node of the cluster, so one question is asked for the whole job, and rarely.
    ask_drained_every_s: float = 60.0
    #: The user's notice. The job holds its nodes meanwhile, and one that is cancelled has KillWait, 30 s by default.
    notice_s: float = 30.0
    notice_before_requeue_s: float = 5.0  #: the grace time of a preemption continues
    #: How often Slurm is asked again about a job of which it did not say anything at the start.
    ask_of_job_every_s: float = 60.0
    follow_up_every_s: float = 300.0  #: between two tries to submit a follow-up job

    # Agents and their ranks.
    #: The agents of a supervisor that has died return by then: first their ranks must end, which may hold GPUs.
    agents_return_s: float = 15.0
    #: An agent that sends nothing for this long is replaced, also if its node answers: it may be stopped (SIGSTOP). A
    #: network may be away for half a minute, and a file server that the agent waits for somewhat longer.
    agent_unheard_s: float = 120.0
    stranger_s: float = 10.0  #: a connection must prove within it that it knows the secret
    most_strangers: int = 256  #: unproved connections beside one of each agent that may connect
    #: A zygote forks within milliseconds. While its answer is awaited the agent does nothing else.
    fork_s: float = 10.0
    #: An import may wait for a slow file server for minutes. A zygote that is stopped (SIGSTOP) will not answer.
    zygote_imports_s: float = 900.0
    zygote_answers_s: float = 10.0
    report_every_s: float = 0.5  #: rank 0 reports to its agent
    stacks_s: float = 3.0  #: ranks write their stacks; those that can do it within milliseconds
    look_for_stacks_every_s: float = 0.1
    gpu_answer_s: float = 15.0  #: a faulty driver may never answer
    mirror_s: float = 300.0  #: for a piece of a copy. On a hard NFS mount a call returns when the server is back

    # Checks of nodes, and copies to them.
    check_nodes_s: float = 30.0  #: a node that has not answered then is unknown
    spares_checked_s: float = 2.0  #: for the spares, once all nodes that ranks are to start on have answered
    check_folder_s: float = 4.0  #: for the caller's own work on the shared folder
    file_seen_within_s: float = 3.0  #: with NFS a node may see another node's new file so much later
    copies_s: float = 1800.0  #: ranks wait no longer for copies: a disk of a node may hang
    other_copiers_s: float = 5.0  #: jobs that look for a copy at the same moment are through then
    copy_is_whole_s: float = 60.0  #: a copy that was whole is not looked at again. Cleaners come once a day

    # Jobs in Slurm, and who waits for them.
    submitting_s: float = 120.0  #: a submission without a job id then has died: sbatch itself times out earlier
    queued_within_s: float = 10.0  #: a job that sbatch may have submitted is looked for
    #: A job that is being ended has ended, or is pending again: KillWait and a margin.
    ending_s: float = 60.0
    look_at_ending_every_s: float = 1.0
    ask_slurm_every_s: float = 30.0  #: whether a job that is waited for still exists
    #: A job's last file may reach the login node so long after the job's end: NFS remembers for up to 60 s that a file
    #: was absent. Only after that time is it certain that the job has written no result.
    files_lag_s: float = 75.0
    read_files_every_s: float = 0.5  #: of a run that is waited for
    look_at_awaited_every_s: float = 1.0  #: by a run that waits for others
    look_at_points_every_s: float = 0.5  #: of a sweep without Slurm
    look_up_s: float = 10.0  #: all look-ups of hosts' names together
    git_s: float = 60.0  #: for git, which names the files of a project

    # The proof of a site.
    look_at_proof_every_s: float = 0.3
    proof_measured_s: float = 300.0  #: the start of its ranks, and their figures
    proof_stopped_s: float = 120.0  #: from the signal on
    proof_returned_s: float = 300.0  #: after the requeue's own delay
    proof_queued_s: float = 12 * 3600.0  #: of a job that shall come back, or follow. The first may wait longer

    # Trackers.
    upload_every_s: float = 5.0
    upload_pause_s: float = 10.0  #: from a failure to the next start while the run continues
    last_upload_pause_s: float = 1.0  #: and once it has ended
    #: For the last points of a run that has ended. The job holds its nodes meanwhile, see ``notice_s``.
    last_points_s: float = 20.0

    #: From a connection to the live page until it is closed, whatever the other side does.
    page_request_s: float = 30.0

    # Sizes.
    snapshot_bytes: int = 200 * 2**20  #: a larger project is refused: it holds data, not only sources
    #: A script is read for its imports up to so much source. Where there is more, a folder of packages is on the path.
    imported_source_bytes: int = 2_000_000
    #: A long file is flushed to disk in pieces. One flush at its end would show no progress for as long as the kernel
    #: has memory to hold it.
    written_piece_bytes: int = 256 * 2**20
    metrics_read_whole_bytes: int = 1 << 24  #: smaller files are read whole at a resume, which finds any bad line
    log_read_bytes: int = 1 << 20  #: a piece of a log: one of many GiB needs no memory
    runs_read_whole: int = 1000  #: runs listed by processes beyond it, which read of an ended run what matters
    copied_bytes_per_s: float = 200e6  #: by a node that copies an environment, until that has been measured
    #: A script that reports nothing is watched after this share of the bound. Many have ended by then, or have called
    #: `toolkit.start()` and report by themselves.
    silence_measured_after_share: float = 0.2
    blocks_read_ahead: int = 4
    kept_samples: int = 1024  #: an open block is dropped when so many samples were read since a sample of it was
    permuted_at_once: int = 1 << 20
    compressed_at_once: int = 1 << 16  #: blocks on a GPU, where each operation costs microseconds: 64 MiB
    logits_at_once: int = 1 << 27  #: of a pass of inference

    def __post_init__(self) -> None:
        for less, more in _IN_ORDER:
            if getattr(self, less) > getattr(self, more):
                raise ValueError(f"{less} is {getattr(self, less)}, and more than {more}, {getattr(self, more)}")


#: What must not be longer than another, or that is over before it can end.
_IN_ORDER = (
    ("status_every_s", "watched_every_s"),
    ("watched_every_s", "files_every_s"),
    ("files_every_s", "supervisor_quiet_s"),
    ("supervisor_quiet_s", "supervisor_silent_s"),
    ("first_pause_s", "longest_pause_s"),
    ("kill_again_s", "unkillable_s"),
    ("dying_s", "unkillable_s"),
    ("script_stop_s", "stop_s"),
    ("spares_checked_s", "check_nodes_s"),
)
_limits = Limits()


def limits() -> Limits:
    """Return the limits of this process."""
    return _limits


def override(**changed: float) -> Limits:
    """Change limits of this process, as tests do, which cannot wait so long. Return those before."""
    global _limits
    before, _limits = _limits, replace(_limits, **changed)  # type: ignore[arg-type]
    return before


def restore(before: Limits) -> None:
    """Undo what :func:`override` has changed since."""
    global _limits
    _limits = before
