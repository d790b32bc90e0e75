#!/bin/bash
#SBATCH --job-name=lipscope
#SBATCH --array=1-64
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --output=lipscope-%A-%a.log
# One study over an array of Slurm jobs that need nothing of each other:
#
#   sbatch examples/slurm_array.sh study MODEL --text my.txt --lengths 8,16,32
#   lipscope merge study study.parts/*
#
# A task that failed or ran out of time resumes with the same line and, for example, --array=3,17.
set -euo pipefail

# Not SLURM_ARRAY_TASK_COUNT, which is 2 when tasks 3 and 17 are submitted again.
shards=${LIPSCOPE_SHARDS:-64}
study=$1
shift
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
exec lipscope measure "$@" --no-report --shard "$SLURM_ARRAY_TASK_ID/$shards" \
  --out "$study.parts/$SLURM_ARRAY_TASK_ID"
