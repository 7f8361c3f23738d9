#!/usr/bin/env bash
# Everything that needs a GPU: its tests, then the figures, one table last. Under 10 minutes on an H200.
#
#   lab/benchmarks/gpu.sh [--tests test_cuda_ipc.py,test_memory_on_gpu.py | --no-tests]
#                     [--rows decode_attention,step_llama8b | --no-rows] [--out FOLDER] [--dry-run]
#
# FOLDER (runtime/gpu) has a file for each row, what each process of tests said, and a log of everything; FOLDER.tar.gz
# has all of them, also where SIGTERM ends this.
#
# Needs torch, triton, transformers, grpcio, protobuf, safetensors and, for the tests, pytest: what CUDA images of PyTorch
# have. PYTHON names another interpreter than the project's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
if ! command -v "$python" > /dev/null; then python=python3; fi
out=runtime/gpu
for ((number = 1; number < $#; number++)); do
  if [ "${!number}" = --out ]; then following=$((number + 1)) out="${!following}"; fi
done
mkdir -p "$out"
# The package is in src; tests import their fixtures from here.
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Either would have products in float32 computed in TF32, which no tolerance of a test allows for.
unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
trap 'tar -czf "${out%/}.tar.gz" -C "$out" .' EXIT
: > "$out/log.txt"
"$python" -P -m baton.lab.benchmarks.gpu "$@" >> "$out/log.txt" 2>&1 &
measuring=$!
trap 'kill "$measuring" 2> /dev/null || true' TERM INT HUP
# What a process that nothing could end still holds is the file, so that the archive does not wait for it.
tail -n +1 -f -s 0.1 --pid="$measuring" "$out/log.txt" &
showing=$!
status=0
wait "$measuring" || status=$?
# A signal ends the first wait alone.
while kill -0 "$measuring" 2> /dev/null; do wait "$measuring" || status=$?; done
wait "$showing" || true
exit "$status"
