#!/usr/bin/env bash
# Prints the digest of the sources that a file of results depends on, so that an edit elsewhere makes no figure old.
#
# usage: scripts/source_digest.sh NAME
#   NAME: lce_peers (written by bench/lce_peers.py), attention and attention_self (by bench/attention_peers.py), model
#   and ranker (by scripts/measure_cpu.sh), ranker_gpu (by bench/ranker_gpu.py), odd_sizes (by bench/odd_sizes.py), checks
#   (by scripts/gpu_check.sh), zoo (by scripts/zoo.sh), zoo_random (by the random programs of tests/python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lce=(kernels/linear_compression* kernels/hopper kernels/scalar* kernels/align_rows* kernels/unaligned_rows.cuh kernels/divisor.h
  kernels/tickets.cuh)
skip=()
case "${1:-}" in
  lce_peers) paths=("${lce[@]}" bench/lce_peers.py bench/device_time.py bench/lce_c_api.cpp) ;;
  attention | attention_self) paths=(kernels/target_attention* kernels/row_windows.h kernels/unaligned_rows.cuh kernels/hopper kernels/scalar* kernels/divisor.h
    kernels/tickets.cuh bench/attention_* bench/device_time.py) ;;
  odd_sizes) paths=(kernels ops/cuda ops/aligned_cat.cc ops/aligned_cat.h bench/odd_sizes.py bench/device_time.py) ;;
  model) paths=(graph ops runtime transform cli cmake CMakeLists.txt examples/movielens) ;;
  ranker) paths=(graph ops runtime transform cli cmake CMakeLists.txt examples/ranker.py) ;;
  zoo) paths=(graph ops runtime transform cli cmake CMakeLists.txt examples/zoo) ;;
  zoo_random) paths=(graph ops runtime transform cmake CMakeLists.txt tests/transform) ;;
  checks) paths=(graph ops runtime transform cli kernels cmake CMakeLists.txt python tests/gpu tests/python) ;;
  ranker_gpu) paths=(graph ops runtime transform cli kernels cmake CMakeLists.txt examples/ranker.py bench/ranker_gpu.py) ;;
  *) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
# Figures of the CPU do not depend on what runs on a GPU.
case $1 in model | ranker | zoo | zoo_random) skip=(-path ops/cuda -prune -o -path examples/zoo/table.py -prune -o) ;; esac
find "${paths[@]}" "${skip[@]}" -type f ! -name '*.md' ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum |
  cut -c1-16
