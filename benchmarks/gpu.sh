#!/usr/bin/env bash
# Everything that needs a GPU: its tests, then the figures, one table last. Under 10 minutes on an H200.
#
#   benchmarks/gpu.sh [--rows decode_attention,step_llama8b] [--no-tests] [--out FOLDER] [--dry-run]
#
# FOLDER (runtime/gpu) has a file for each row and a log of everything; FOLDER.tar.gz has all of them.
#
# Needs torch, triton, transformers, grpcio, protobuf, safetensors and, for the tests, pytest: what CUDA images of PyTorch
# have. PYTHON names another interpreter than the project's own.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
if ! command -v "$python" > /dev/null; then python=python3; fi
out=runtime/gpu
for ((number = 1; number < $#; number++)); do
  if [ "${!number}" = --out ]; then following=$((number + 1)) out="${!following}"; fi
done
mkdir -p "$out"
# The package is in src; tests import their fixtures from here.
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
"$python" -P -m baton.benchmarks.gpu "$@" 2>&1 | tee "$out/log.txt" || status=$?
tar -czf "${out%/}.tar.gz" -C "$out" .
exit "$status"
