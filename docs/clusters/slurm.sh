#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

# Every node gives the same command and says which one it is. They meet at the first of them.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export first

status=0
srun --kill-on-bad-exit=0 bash -c '
  exec holdfast run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rendezvous "$first:29400" \
    --workers 8 --save-every 200 --out "$HOME/runs/a" train.py -- --epochs 30
' || status=$?

# 75: asked to stop, saved, and ready to go on. Put the job into the queue again; the next start goes on from there.
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
