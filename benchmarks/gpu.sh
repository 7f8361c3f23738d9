#!/usr/bin/env bash
# Everything that needs a GPU: its tests, then the figures, one table last. Under 10 minutes on an H200.
#
#   benchmarks/gpu.sh [--rows decode_attention,step_llama8b] [--no-tests] [--out FOLDER] [--dry-run]
#
# Needs torch, triton, transformers, grpcio, protobuf, safetensors and, for the tests, pytest: what CUDA images of PyTorch
# have. PYTHON names another interpreter than the project's own.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
if ! command -v "$python" > /dev/null; then python=python3; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -P -m baton.benchmarks.gpu "$@"
