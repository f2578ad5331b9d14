#!/bin/sh
# A day with a GPU: correctness, kernel times, decode steps, throughput, one table. See docs/gpu_day.md.
# PYTHON names the interpreter that has torch and triton; all arguments go to `python -m benchmarks.gpu`.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
