#!/usr/bin/env bash
# Everything that needs a cluster or a container, on one Debian machine and as root: brings up SLURM, installs what builds
# images, tests both (launches whose jobs run in the image that the Dockerfile makes among them), and takes it all down.
#     tests/cluster/all.sh [what to give pytest]
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || echo .uv/bin/uv)
trap 'tests/cluster/down.sh --remove' EXIT # also of what came up by half
tests/cluster/up.sh
tests/containers/install.sh
PATH=$PWD/.apptainer/usr/bin:$PATH "$uv" run pytest -m "containers or not containers" tests/cluster tests/containers "$@"
