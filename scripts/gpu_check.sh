#!/usr/bin/env bash
# Builds the kernels on a machine with a Hopper GPU, checks them and, when asked, measures.
#
# usage: scripts/gpu_check.sh [build] [test] [sanitize] [bench]     all but bench when none is named
#   BUILD=...       the build folder (build/kernels)
#   BLOCKS=...      tile heights to build, as a CMake list; all when empty
#   GOOGLETEST=...  a folder with GoogleTest's sources, where it is not installed
#   OUT=...         where bench writes its JSON (the build folder)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD:-build/kernels}
steps=${*:-build test sanitize}

run_build() {
  cmake -G Ninja -S kernels -B "$build" -DCMAKE_BUILD_TYPE=Release \
    ${BLOCKS:+-DIKBO_LCE_BLOCKS="$BLOCKS"} ${GOOGLETEST:+-DIKBO_GOOGLETEST_DIR="$(realpath "$GOOGLETEST")"} >"$build.log" ||
    { cat "$build.log"; return 1; }
  cmake --build "$build" >>"$build.log" || { grep -E 'error|FAILED' -A5 "$build.log"; return 1; }
}

run_test() {
  "$build"/tests/linear_compression_config_test --gtest_brief=1
  timeout -s KILL 60 "$build"/tests/linear_compression_gpu_test --gtest_brief=1
}

run_sanitize() {
  for tool in memcheck racecheck synccheck; do
    echo "compute-sanitizer --tool $tool"
    timeout -s KILL 300 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$build"/tests/linear_compression_gpu_test --gtest_brief=1 --gtest_filter='LinearCompressionSmall.*'
  done
}

run_bench() {
  "$build"/bench/lce_bench --cases main --json "${OUT:-$build}/lce_main.json"
  "$build"/bench/lce_bench --cases sweep --json "${OUT:-$build}/lce_sweep.json"
}

mkdir -p "$build"
for step in $steps; do
  "run_$step"
done
