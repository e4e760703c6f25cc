#!/usr/bin/env bash
# A real SLURM on this machine, with accounting: munged, MariaDB, slurmdbd, slurmctld and one slurmd a node, from
# Debian's packages, without systemd. Idempotent: installs what is missing, starts what does not run.
#   sudo tests/cluster/up.sh && uv run pytest tests/cluster; sudo tests/cluster/down.sh --remove
# Its GPUs are make-believe, unless LAB_DEVICES says where real ones are (/dev/nvidia; gpu.sh does it). LAB_PACKAGES=FOLDER:
# unpack the packages (*.deb) of a folder, on a machine that can install none. LAB_ACCOUNTING=0: no MariaDB and no slurmdbd.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "up.sh: needs root on Debian or Ubuntu" >&2; exit 1; }
read -ra gpus <<<"${LAB_GPUS:-l40s:2 a100:1 l40s:2}" # one word TYPE:COUNT a node
devices=${LAB_DEVICES:-$lab/dev/nvidia} accounting=${LAB_ACCOUNTING:-1}
cpus=${LAB_CPUS:-2} memory_mb=${LAB_MEMORY_MB:-16000} # of a node; may exceed the machine's
wait_for() { # SECONDS WHAT COMMAND...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS <= end)) || { echo "up.sh: $what did not start; see $lab/log" >&2; return 1; }
    sleep .05
  done
}

# ---- packages: 12 MB to fetch, 76 MB on disk; what was installed here, down.sh --remove takes away ----
mkdir -p "$lab"/{etc,run,log,db,dev,state,munge,spool}
wanted=(slurmctld slurmd slurm-client munge)
[ "$accounting" = 0 ] || wanted+=(slurmdbd mariadb-server-core mariadb-client-core iproute2 faketime)
missing=()
for package in "${wanted[@]}"; do
  [ -z "${LAB_PACKAGES:-}" ] || break
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} != 0 ]; then
  policy=/usr/sbin/policy-rc.d # the packages must not start their own daemons
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; trap 'rm -f $policy' EXIT; }
  apt=(apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2)
  export DEBIAN_FRONTEND=noninteractive
  install=(install -y --no-install-recommends "${missing[@]}")
  { "${apt[@]}" update && "${apt[@]}" -s "${install[@]}" >"$lab/run/plan" && "${apt[@]}" "${install[@]}"; } \
    >"$lab/log/apt.log" 2>&1 || { tail -5 "$lab/log/apt.log" >&2; echo "up.sh: apt cannot install SLURM" >&2; exit 1; }
  awk '/^Inst / { print $2 }' "$lab/run/plan" >>"$lab/installed" # their dependencies, too
fi
if [ -n "${LAB_PACKAGES:-}" ] && ! command -v slurmctld >/dev/null; then
  # Beside the system's own files, none of which is replaced: they may be of another release than the packages.
  libraries=usr/lib/$(uname -m)-linux-gnu
  work=$(mktemp -d)
  for package in "$LAB_PACKAGES"/*.deb; do dpkg-deb -x "$package" "$work"; done
  for daemon in slurmctld slurmd slurmstepd; do ln -sfn $daemon-wlm "$work/usr/sbin/$daemon"; done
  mkdir -p "$work/etc/ld.so.conf.d" "$lab/lib"
  mv "$work/$libraries"/*.so.* "$lab/lib/"
  echo "$lab/lib" >"$work/etc/ld.so.conf.d/zz-minfer-slurm.conf" # the last, so that the system's own libraries win
  (cd "$work" && find usr/bin usr/sbin "$libraries/slurm-wlm" etc/ld.so.conf.d ! -type d) | while read -r file; do
    [ ! -e "/$file" ] || continue
    mkdir -p "/${file%/*}"
    cp -a "$work/$file" "/$file"
    echo "/$file" >>"$lab/unpacked"
  done
  rm -rf "$work"
  ldconfig
fi

# ---- configuration ----
chmod 755 "$lab" "$lab"/*/
chmod 700 "$lab/db" "$lab/munge" "$lab/state"
for ((gpu = 0; gpu < 16; gpu++)); do ln -sfn /dev/null "$lab/dev/nvidia$gpu"; done # a fake GPU: a character device
[ -s "$lab/munge/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$lab/munge/munge.key")
host=$(hostname -s)
{
  cat <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((port + 17))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job cannot start before its credential has run out; usual: 120 s.
AuthInfo=socket=$lab/run/munge.socket,cred_expire=5
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldPidFile=$lab/run/slurmctld.pid
SlurmdPidFile=$lab/run/slurmd.%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MaxArraySize=1001
# A failure is noticed in seconds; usual: SlurmdTimeout=300 MessageTimeout=10 KillWait=30.
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
ReturnToService=2
JobRequeue=1
JobAcctGatherType=jobacct_gather/linux
GresTypes=gpu
SlurmdParameters=config_overrides
CONF
  [ "$accounting" = 0 ] || cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 19))
AccountingStoragePass=$lab/run/munge.socket
AccountingStorageTRES=gres/gpu
CONF
  for ((n = 1; n <= ${#gpus[@]}; n++)); do
    echo "NodeName=node$n NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 100 + n)) CPUs=$cpus" \
      "RealMemory=$memory_mb Gres=gpu:${gpus[n - 1]} Features=${gpus[n - 1]%%:*}"
  done
  echo "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
} >"$lab/etc/slurm.conf"
{
  echo AutoDetect=off
  for ((n = 1; n <= ${#gpus[@]}; n++)); do
    echo "NodeName=node$n Name=gpu Type=${gpus[n - 1]%%:*} File=${devices}[0-$((${gpus[n - 1]##*:} - 1))]"
  done
} >"$lab/etc/gres.conf"
echo CgroupPlugin=cgroup/v1 >"$lab/etc/cgroup.conf" # is not used, and to find out which there is fails in some sandboxes
(
  umask 077
  cat >"$lab/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$lab/run/munge.socket
DbdHost=localhost
DbdPort=$((port + 19))
SlurmUser=root
LogFile=$lab/log/slurmdbd.log
PidFile=$lab/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 6))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CONF
)
# Where sbatch looks unless SLURM_CONF says otherwise, so that every shell has the cluster.
mkdir -p /etc/slurm
[ -e /etc/slurm/slurm.conf ] || ln -sfn "$SLURM_CONF" /etc/slurm/slurm.conf

# ---- daemons ----
alive munged munged || {
  rm -f "$lab"/run/munge.socket*
  munged --force --key-file="$lab/munge/munge.key" --socket="$lab/run/munge.socket" --pid-file="$lab/run/munged.pid" \
    --log-file="$lab/log/munged.log" --seed-file="$lab/munge/munged.seed" --origin=127.0.0.1
}
wait_for 30 munged munge -n -S "$lab/run/munge.socket"
if [ "$accounting" != 0 ]; then
  alive mariadb 'mariadbd|mysqld' || {
    [ -d "$lab/db/mysql" ] || mariadb-install-db --no-defaults --force --skip-name-resolve --user=root \
      --datadir="$lab/db" --auth-root-authentication-method=socket --skip-test-db >"$lab/log/mariadb-install.log" 2>&1
    setsid nohup mariadbd --no-defaults --user=root --datadir="$lab/db" --socket="$lab/run/mysqld.sock" \
      --pid-file="$lab/run/mariadb.pid" --bind-address=127.0.0.1 --skip-name-resolve --port=$((port + 6)) \
      --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 >"$lab/log/mariadb.log" 2>&1 </dev/null &
  }
  sql=(mariadb --no-defaults -uroot -S "$lab/run/mysqld.sock" -e)
  wait_for 60 MariaDB "${sql[@]}" 'select 1'
  alive slurmdbd slurmdbd || {
    for at in localhost 127.0.0.1; do
      "${sql[@]}" "CREATE DATABASE IF NOT EXISTS slurm_acct_db;
        CREATE USER IF NOT EXISTS slurm@'$at' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO slurm@'$at';"
    done
    slurmdbd
  }
  wait_for 60 slurmdbd timeout 5 sacctmgr -n show cluster
  [ -n "$(sacctmgr -n show cluster lab format=cluster)" ] || sacctmgr -i add cluster lab >/dev/null
fi
alive slurmctld slurmctld || slurmctld
for ((n = 1; n <= ${#gpus[@]}; n++)); do
  mkdir -p "$lab/spool/node$n"
  alive "slurmd.node$n" slurmd || slurmd -N "node$n"
done
wait_for 30 slurmctld timeout 5 scontrol ping
for node in $(sinfo -h -N -t drain,fail -o %N | sort -u); do scontrol update nodename="$node" state=resume || true; done
ready() { [ "$(sinfo -h -N -o %T | grep -cE '^(idle|mixed|allocated)$')" = ${#gpus[@]} ]; }
wait_for 60 "a slurmd" ready
echo "up.sh: SLURM is up after ${SECONDS} s: $(sinfo -h -N -o '%N (%c CPUs, %G)' | paste -sd, | sed 's/,node/, node/g')"
