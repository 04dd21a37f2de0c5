#!/bin/bash
# Train with one or more DDP ranks on each of four nodes.
#
#   sbatch sbatch/ddp_4node.sh                                            # digits, four nodes, one rank on each
#   sbatch --ntasks-per-node=4 sbatch/ddp_4node.sh                        # four ranks on each node
#   sbatch -N1 sbatch/ddp_4node.sh                                        # one node
#   sbatch sbatch/ddp_4node.sh configs/digits_ddp.yaml optim.lr=0.1       # another config, with overrides
#
# #SBATCH lines (and sbatch's own arguments, which win over them) state the size of the job. The run's folder appears
# under runs/; `toolkit status`, `toolkit logs RUN --follow` and `toolkit cancel RUN` look after it.
#
#SBATCH --job-name=ddp
#SBATCH --nodes=4
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

trap '' HUP INT TERM USR1 USR2  # a stop that comes before toolkit has started must not end the job without a result

# Slurm runs a spooled copy of this script, so its own path says nothing: the project is the folder that sbatch was
# called in, or TOOLKIT_HOME.
project=${TOOLKIT_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}
if [[ ! -f $project/jobs/classify.py ]]; then
    echo "ddp_4node.sh: $project is not the project; call sbatch in the project's folder, or export TOOLKIT_HOME" >&2
    exit 2
fi
cd "$project" || exit 2

# The environment: .venv in the project. If your site uses modules or conda, fill in its lines here, for example
#   module load python/3.12 && source ~/envs/toolkit/bin/activate
#   source ~/miniforge3/bin/activate toolkit
if [[ -f .venv/bin/activate ]]; then
    source .venv/bin/activate
fi
if ! command -v toolkit >/dev/null; then
    echo "ddp_4node.sh: no environment with the toolkit: no .venv in $project and no \`toolkit\` on PATH;" \
        "run \`make .venv\` there, or fill in the module or conda line of this script" >&2
    exit 2
fi

# A first argument that is not key=value is the config.
config=configs/digits_ddp_4node.yaml
if [[ $# -gt 0 && $1 != *=* ]]; then
    config=$1
    shift
fi

# exec: a bash between Slurm and the supervisor would die at the first SIGTERM and take the supervisor along.
exec toolkit supervise "$config" "$@"
