# One file, two images: `router` (no torch, it only routes) and `worker` (every process; `cli up` starts all of them).
# docker build --target router .      docker build --target worker --build-arg TORCH=cpu|cuda .
# pypi.org has torch for CUDA 13, which needs a driver of at least 580. For an older driver, take another index:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126, where that has this version of torch.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
# Of the labels; docs/releases.md has the command that fills them in.
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG SOURCE=unknown

FROM ${PYTHON_IMAGE} AS base
ENV XDG_CACHE_HOME=/tmp/.cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/baton/src PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /baton
# The workers of one host read each other's KV through /proc: they must be the same user, and need no other right.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin baton
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/
# Everything that pyproject.toml names but torch, which the router never imports.
RUN python deploy/requirements.py pyproject.toml > /tmp/requirements.txt \
    && pip install --constraint constraints.txt --requirement /tmp/requirements.txt

FROM base AS router
COPY src src
COPY protos protos
COPY process process
COPY text text
COPY client client
COPY launch launch
COPY cli cli
# The command line reads the workers' configurations, and nothing else of them.
COPY worker/__init__.py worker/config.py worker/
COPY prefill_worker/__init__.py prefill_worker/config.py prefill_worker/
COPY decode_worker/__init__.py decode_worker/config.py decode_worker/
COPY elastic_worker/__init__.py elastic_worker/config.py elastic_worker/
COPY router router
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="baton-router" \
      org.opencontainers.image.description="Routes requests to the workers of Baton, over gRPC and HTTP" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
# `python -m baton.cli version` names it.
RUN echo "$REVISION" > REVISION
USER baton
EXPOSE 50051 8000
# The command is the name of one of our packages, and its flags. `gateway` and `worker` are names of release 0.1.
ENTRYPOINT ["/bin/sh", "-c", "case $0 in gateway) set -- router \"$@\" ;; worker) set -- elastic_worker \"$@\" ;; *) set -- \"$0\" \"$@\" ;; esac; exec python -m baton.\"$@\""]
CMD ["router"]

FROM base AS worker
ARG TORCH=cuda
ARG TORCH_INDEX=
# A comma-separated list of extras of pyproject.toml: `nixl` reads KV of other hosts by RDMA.
ARG EXTRAS=
# CUDA: PyTorch's wheels bring the CUDA libraries, the host brings the driver; Triton compiles its launcher with gcc
# and the headers of Python, which the Python image has. CPU: the build without CUDA, from pip's own sources if there.
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && if [ "$TORCH" = cpu ]; then \
         pip install --constraint constraints.txt "torch==$version+cpu" \
         || pip install --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu"; \
       else \
         apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
         && pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$version"; \
       fi
RUN if [ -n "$EXTRAS" ]; then \
      python deploy/requirements.py pyproject.toml "$EXTRAS" > /tmp/extras.txt \
      && pip install --constraint constraints.txt --requirement /tmp/extras.txt; \
    fi
# Volumes take their owners from these folders.
RUN install --directory --owner baton /triton /baton/runtime
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/triton
COPY src src
COPY protos protos
COPY process process
COPY text text
COPY client client
COPY launch launch
COPY cli cli
COPY kernels kernels
# The image without a compiler serves too, only slower: attention then runs in PyTorch.
RUN if [ "$TORCH" = cpu ]; then \
      apt-get update && apt-get install --yes --no-install-recommends g++ \
      && python -m baton.kernels.native.build --all && apt-get purge --yes --auto-remove g++ && rm -rf /var/lib/apt/lists/* \
      || echo "native kernels are not in this image"; \
    fi
COPY engine engine
COPY kvtransfer kvtransfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY elastic_worker elastic_worker
COPY worker worker
COPY router router
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="baton-worker" \
      org.opencontainers.image.description="Serves large language models: workers, router and HTTP" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
# `python -m baton.cli version` names it.
RUN echo "$REVISION" > REVISION
USER baton
EXPOSE 50061
# The command is the name of one of our packages, and its flags. `gateway` and `worker` are names of release 0.1.
ENTRYPOINT ["/bin/sh", "-c", "case $0 in gateway) set -- router \"$@\" ;; worker) set -- elastic_worker \"$@\" ;; *) set -- \"$0\" \"$@\" ;; esac; exec python -m baton.\"$@\""]
CMD ["prefill_worker", "--help"]
