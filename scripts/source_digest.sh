#!/usr/bin/env bash
# Prints the digest of the sources that a file of results depends on, so that an edit elsewhere makes no figure old.
#
# usage: scripts/source_digest.sh NAME
#   NAME: lce (written by bench/lce_bench), lce_peers (by bench/lce_peers.py), model and ranker (by
#   scripts/measure_cpu.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  lce) paths=(kernels bench/lce_bench.cpp bench/lce_contestants.* bench/lce_steps.* tests/gpu/lce_inputs.*) ;;
  lce_peers) paths=(kernels bench/lce_peers.py bench/lce_c_api.cpp) ;;
  model) paths=(graph ops runtime transform cli cmake CMakeLists.txt examples/movielens) ;;
  ranker) paths=(graph ops runtime transform cli cmake CMakeLists.txt examples/ranker.py) ;;
  *) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
find "${paths[@]}" -type f ! -name '*.md' ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum |
  cut -c1-16
