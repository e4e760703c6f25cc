#!/usr/bin/env bash
# A one-node SLURM around this machine's own GPUs, and an Apptainer image for a machine that can pull none: as root,
#
#     tests/cluster/gpu.sh up                  up.sh's SLURM, without accounting; a GPU is asked for as gpu:1 or gpu:h200:1
#     tests/cluster/gpu.sh image FOLDER        a sandbox with this machine's software; prints container.* for the launcher
#     tests/cluster/gpu.sh down                takes SLURM down, and away what was installed for it
#
# so that these are a launch through both:
#
#     export SLURM_CONF=/var/tmp/minfer-gpu/etc/slurm.conf
#     python -m minfer.launch +sweep=hgemm cluster=slurm $(tests/cluster/gpu.sh image /var/tmp/minfer-image)
#
# Where apt has no network, LAB_PACKAGES is a folder with Debian 12's packages: in an empty one, on a Debian 12,
#     apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblz4-1 \
#         libjson-c5 liblua5.1-0 libyaml-0-2 libjwt0 libhttp-parser2.9
# PYTHON is the interpreter whose packages the image has (default: python3, as it is on the PATH and with its PYTHONPATH).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export LAB_DIR=${LAB_DIR:-/var/tmp/minfer-gpu}
python=${PYTHON:-python3}

up() {
  local count model
  count=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
  [ "$count" != 0 ] || { echo "gpu.sh: this machine has no /dev/nvidia0, so no NVIDIA GPU" >&2; exit 1; }
  model=$(nvidia-smi --query-gpu=name --format=csv,noheader | tr '[:upper:]' '[:lower:]' | grep -oE -m1 '\b[a-z]+[0-9]+[a-z]*') || true
  export LAB_GPUS=${LAB_GPUS:-${model:-nvidia}:$count} LAB_DEVICES=/dev/nvidia LAB_ACCOUNTING=0
  export LAB_CPUS=${LAB_CPUS:-$(nproc)} LAB_MEMORY_MB=${LAB_MEMORY_MB:-$(awk '/^MemTotal/ { print int($2 / 1024 * 0.9) }' /proc/meminfo)}
  "$here/up.sh"
}

# The container is real (its own root, mounts, environment and labels); what it contains are this machine's /usr and /opt,
# and the packages of one Python, all bound in and read-only.
image() {
  local image=$1 place base binds about=/.singularity.d
  mkdir -p "$image"/{usr,etc,opt,proc,sys,dev,tmp,root,var/tmp,home,$about/env}
  for place in bin sbin lib lib64; do ln -sfn usr/$place "$image/$place"; done
  cp /etc/passwd /etc/group "$image/etc/"

  # Its `python` finds the packages by its own configuration, because PYTHONPATH is the job's.
  "$python" -m venv --without-pip --clear "$image/python"
  binds=$("$python" - "$image"/python/lib/python3*/site-packages "$(dirname "$(dirname "$here")")" <<'PY'
import os, sys
from pathlib import Path

packages, clone = (Path(word).resolve() for word in sys.argv[1:])
given = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(":") if path]
found = dict.fromkeys(Path(path).resolve() for path in sys.path if path)
places = [p for p in found if p.is_dir() and (p in given or p.name.endswith("-packages")) and p != clone]
(packages / "host.pth").write_text("".join(f"import site; site.addsitedir({str(place)!r})\n" for place in places))
bound = [Path("/usr"), Path("/opt")]
for place in sorted({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), *places}):
    if not any(place.is_relative_to(outer) for outer in bound):
        bound.append(place)
bound += [place for place in map(Path, ("/etc/alternatives", "/etc/ld.so.cache")) if place.exists()]
print(",".join(f"'{place}:{place}:ro'" for place in bound))
PY
  )

  # What rows say of it: the system's release, and a digest of all that is installed, since nobody can pull this image.
  base=$(. /etc/os-release && echo "$ID-$VERSION_ID")@sha256:$({
    dpkg-query -W
    "$python" -c 'from importlib.metadata import *; print(*sorted({f"{d.name} {d.version}" for d in distributions()}), sep="\n")'
  } | sha256sum | cut -d' ' -f1)
  cat >"$image$about/env/90-environment.sh" <<ENV
export PATH="/python/bin:$(realpath "$("$python" -c 'import sys; print(sys.prefix)')")/bin:\$PATH"
export MINFER_IMAGE_DIGEST="$base"${CUDA_HOME:+ CUDA_HOME="$CUDA_HOME"}${LD_LIBRARY_PATH:+ LD_LIBRARY_PATH="$LD_LIBRARY_PATH"}
ENV
  echo "# Apptainer applies --env, and what it is told by APPTAINERENV_*, after a file of this name." >"$image$about/env/99-base.sh"
  echo "{\"org.opencontainers.image.base.name\": \"$base\"}" >"$image$about/labels.json"
  echo "container=apptainer container.image=$image container.binds=[$binds]"
}

case ${1:-} in
  up) up ;;
  image) image "$(realpath -m "${2:?folder}")" ;;
  down) "$here/down.sh" --remove ;;
  *) sed -n '2,/^set/s/^# \?//p' "$0" >&2; exit 2 ;;
esac
