#!/bin/bash
# Train on two kinds of nodes at once, as a heterogeneous job of Slurm: its components are divided by `hetjob`.
#
#   sbatch sbatch/ddp_het.sh                                              # two ranks on one node, one on each of two others
#   sbatch -p fast sbatch/ddp_het.sh                                      # the first component in another partition
#   sbatch -p fast : -p slow sbatch/ddp_het.sh configs/digits_ddp.yaml data.balance=auto
#
# Ranks fill one component after the other. What sbatch gets before a colon is for the first component, what it gets
# behind it for the next.
#
#SBATCH --job-name=ddp_het
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --requeue

trap '' HUP INT TERM USR1 USR2  # a stop that comes before toolkit has started must not end the job without a result

# The batch host is the first node of the first component. It does there what the script of any other job does.
exec bash "${TOOLKIT_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}/sbatch/ddp_4node.sh" "$@"
