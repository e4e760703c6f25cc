# minfer and all that it needs but the driver: docs/containers.md has the commands.
#
#     docker build -t minfer .
#     docker run --gpus all -v "$PWD/results:/workspace/results" minfer +sweep=hgemm
#     docker run --gpus all minfer pytest
#
# A base with CUDA 12 (nvidia/cuda:12.8.1-devel-ubuntu24.04) makes an image for drivers that predate CUDA 13.
ARG BASE_IMAGE=nvidia/cuda:13.2.1-devel-ubuntu24.04

FROM ${BASE_IMAGE} AS system
ARG NSIGHT_COMPUTE=1
# The site's own certificate authority, as PEM text, where a proxy opens TLS connections.
ARG CA_CERTIFICATE=
ENV DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# NVIDIA's -devel images have Nsight Compute; their others have the apt repository that has it.
# hadolint ignore=DL3008
RUN if [ -n "$CA_CERTIFICATE" ]; then \
        mkdir -p /usr/local/share/ca-certificates /etc/ssl/certs \
        && echo "$CA_CERTIFICATE" > /usr/local/share/ca-certificates/site.crt \
        && cat /usr/local/share/ca-certificates/site.crt >> /etc/ssl/certs/ca-certificates.crt; \
    fi \
    && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && if [ "$NSIGHT_COMPUTE" = 1 ] && ! command -v ncu && ! ls /opt/nvidia/nsight-compute/*/ncu; then \
        package="cuda-nsight-compute-$(echo "${CUDA_VERSION:-none}" | cut -d. -f1,2 | tr . -)"; \
        apt-get install -y --no-install-recommends "$package" || { \
            echo "the base image has no Nsight Compute, and no repository to install $package from;" \
                "build with --build-arg NSIGHT_COMPUTE=0 to do without" >&2; \
            exit 1; \
        }; \
    fi \
    && rm -rf /var/lib/apt/lists/*

FROM system AS dependencies
# The site's own package index; PyPI where it is empty.
ARG INDEX_URL=
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    UV_PROJECT_ENVIRONMENT=/opt/minfer UV_PYTHON=/usr/bin/python3 UV_COMPILE_BYTECODE=1
WORKDIR /tmp/project
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir ${INDEX_URL:+--index-url "$INDEX_URL"} uv==0.13.9
COPY pyproject.toml ./
COPY cuda12/pyproject.toml cuda12/
RUN if [ "${CUDA_VERSION%%.*}" = 12 ]; then export UV_PROJECT=cuda12; fi \
    && /opt/uv/bin/uv sync --no-cache --no-default-groups --group test --no-install-local ${INDEX_URL:+--default-index "$INDEX_URL"}

FROM system
COPY --from=dependencies /opt/minfer /opt/minfer
# The command of a wheel, for sources that are not installed, and the entry point of the image.
# hadolint ignore=SC2016
RUN printf '%s\n' '#!/bin/sh' 'exec /opt/minfer/bin/python -m minfer "$@"' > /opt/minfer/bin/minfer \
    && printf '%s\n' '#!/bin/sh' \
        '# A command of the image (python, pytest, bash, ncu) runs as it is; all else is for minfer (+sweep=hgemm, report).' \
        '[ "${1-}" != minfer ] || shift' \
        'if command -v -- "${1-}" >/dev/null; then exec "$@"; fi' \
        '# The commands that minfer suggests will be typed where the container was started.' \
        'MINFER_STARTED_OUTSIDE=1 exec minfer "$@"' \
        > /opt/minfer/bin/minfer-container \
    && chmod +x /opt/minfer/bin/minfer /opt/minfer/bin/minfer-container
# Whoever runs the container (docker run --user) can write results, logs and caches, and is somebody to Python.
RUN useradd --uid 1000 --non-unique --no-log-init minfer \
    && mkdir -p /workspace/results /workspace/runs /home/minfer \
    && chmod 1777 /workspace /workspace/results /workspace/runs /home/minfer
# Always these sources, also in a folder with others (PYTHONSAFEPATH): MINFER_COMMIT is theirs.
ENV PATH=/opt/minfer/bin:${PATH} PYTHONPATH=/workspace PYTHONSAFEPATH=1 \
    HOME=/home/minfer USER=minfer LOGNAME=minfer \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
COPY . .
# Last, because they change with every commit: what a row says of where it was made.
ARG BASE_IMAGE
ARG BASE_DIGEST=
ARG COMMIT=
ENV MINFER_IMAGE_DIGEST=${BASE_DIGEST:-$BASE_IMAGE} MINFER_COMMIT=${COMMIT}
LABEL org.opencontainers.image.revision=${COMMIT} \
      org.opencontainers.image.base.name=${BASE_IMAGE} \
      org.opencontainers.image.base.digest=${BASE_DIGEST}
USER 1000
ENTRYPOINT ["minfer-container"]
