#!/usr/bin/env bash
# Starts Slurm on one node, this machine, in a scratch folder, and makes two results of the workflow with it at toy
# size: a training run, then a measurement that loads its network. Needs Debian's packages slurm-wlm and munge, and
# requirements-dev.txt. Exit status: 0 passed, 1 failed, 77 skipped.
set -uo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
daemons=()
finish() {
  [ -d "$scratch/bin" ] && scancel --partition=all && within_30_s ready
  kill "${daemons[@]}" 2> /dev/null
  wait
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 1' INT TERM
skip() { echo "skipped: two toy results on Slurm, since $*"; exit 77; }
fail() {
  echo "FAILED: $*"
  find "$scratch" -name "*.log" -path "*slurm*" -exec tail -n 20 {} +
  exit 1
}
start() { setsid "$@" > "$scratch/$1.log" 2>&1 & daemons+=($!); }
within_30_s() { for _ in {1..30}; do "$@" && return; sleep 1; done; return 1; }
ready() { [ "$(sinfo --noheader --format=%T 2> /dev/null)" = idle ]; }

PATH=$PATH:/usr/sbin
for program in munged slurmctld slurmd; do
  command -v $program > /dev/null || skip "$program is not installed (apt-get install slurm-wlm munge)"
done

# munge, which wants a socket that every user can reach
chmod 711 "$scratch"
(umask 077 && head -c 1024 /dev/urandom > "$scratch/munge.key")
start munged --foreground --num-threads=10 --key-file="$scratch/munge.key" --socket="$scratch/munge.socket" \
  --pid-file="$scratch/munged.pid" --seed-file="$scratch/munge.seed"
within_30_s test -S "$scratch/munge.socket" || skip "munged did not start: $(tail -n 1 "$scratch/munged.log")"

# Slurm on two free ports, without accounting
export SLURM_CONF=$scratch/slurm.conf
read -r port node_port < <(python3 -c '
import socket
sockets = [socket.create_server(("", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in sockets))')
cat > "$SLURM_CONF" << END
ClusterName=scratch
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$node_port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$scratch/munge.socket
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
$(slurmd -C | head -n 1) NodeAddr=127.0.0.1
PartitionName=all Nodes=ALL Default=YES
END
mkdir -m 700 "$scratch/state" "$scratch/spool"
start slurmctld -D
start slurmd -D
within_30_s ready || skip "its node was not ready after 30 s: $(grep -h error "$scratch"/slurm*.log | tail -n 1)"

# Snakemake's plugin removes SLURM_CONF from the environment of the srun that it calls in a job.
mkdir "$scratch/bin"
printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$SLURM_CONF" "$(command -v srun)" > "$scratch/bin/srun"
chmod +x "$scratch/bin/srun"
PATH=$scratch/bin:$PATH

# A copy of the project has no results yet.
mkdir "$scratch/project"
tar --exclude=.git --exclude=.venv --exclude=.snakemake --exclude=./runs -cf - . | tar -C "$scratch/project" -xf -
cd "$scratch/project"
measured=$(python3 -c '
import sys
sys.path.insert(0, "workflow")
import result_files, runs
result = next(result for result in runs.RESULTS if result.name == "multimnist_capsnet/main-uniform/deep-0")
print(f"runs/quick/runs/{result_files.since(result)}/{result.name}/metrics.json")')
timeout --foreground --kill-after=30 600 python3 -m snakemake --profile workflow/slurm --config quick=True --slurm-status-command squeue \
  --slurm-init-seconds-before-status-checks 5 --retries 0 "$measured" || fail "Snakemake on Slurm, see above"
ls -l "$measured" "${measured/-uniform/}" || fail "a result is missing"
squeue --states=all --noheader --format="job %i: %T, %C core, %m, %l" | tee "$scratch/jobs"
[ "$(grep -c "COMPLETED, 1 core, 4000M, 1:01:00$" "$scratch/jobs")" = 2 ] ||
  fail "not two jobs of Slurm's with the memory and the time limit of the Snakefile"
