#!/usr/bin/env bash
# Builds everything on a machine with a Hopper GPU, checks it there and, when asked, measures. It needs PyTorch 2.11 (CUDA
# 13.0) in python3 with pytest, CMake, ninja and nvcc, no network: what else is needed stands in the folder that
# scripts/pack_gpu.sh packs.
#
# usage: scripts/gpu_check.sh [build] [test] [sanitize] [bench]     all but bench when none is named
#   PACK=...     the packed folder (.gpu); not needed where Debian's packages are installed
#   BUILD=...    the build folder (build/gpu)
#   BLOCKS=...   tile heights of linear compression to build, as a CMake list; all when empty
#   OUT=...      where JSON is written (the build folder); bench/results/h200 keeps what is committed: checks.json, what
#                passed on which machine; and what bench measured
#   SELECT=...   which Python tests run under the memory checker, as pytest's -k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

pack=${PACK:-.gpu}
build=${BUILD:-build/gpu}
out=${OUT:-$build}
steps=("$@")
((${#steps[@]})) || steps=(build test sanitize)
readonly OPERATOR_TESTS=(tests/python/test_ops_values.py tests/python/test_ops_gradients.py
  tests/python/test_ops_compile.py tests/python/test_compression.py tests/python/test_attention.py
  tests/python/test_self_attention.py tests/python/test_aligned_cat.py tests/python/test_cuda.py
  tests/python/test_tune.py)

use_packed() {
  [[ ! -d $pack ]] && return
  options+=(-DCMAKE_PREFIX_PATH="$(realpath "$pack")" -DIKBO_GOOGLETEST_DIR="$(realpath "$pack")/googletest")
}

build_step() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DIKBO_CUDA=ON -DIKBO_KERNELS_CHECKS=ON
    -DPython3_EXECUTABLE="$(command -v python3)")
  use_packed
  [[ -z ${BLOCKS:-} ]] || options+=(-DIKBO_LCE_BLOCKS="$BLOCKS")
  cmake -G Ninja -S . -B "$build" "${options[@]}" >"$build/configure.log" 2>&1 ||
    { cat "$build/configure.log" >&2 && die "configuring failed, see above"; }
  cmake --build "$build" >"$build/build.log" 2>&1 ||
    { grep -E 'error|FAILED' -A 5 "$build/build.log" >&2; die "the build failed, see above"; }
  note "built in $build"
}

# pytest on the GPU, with what was built here. xdist, where it is installed, keeps the GPU busy.
gpu_pytest() {
  local name=$1
  shift
  IKBO_TEST_DEVICE=cuda IKBO=$PWD/$build/cli/ikbo IKBO_LIBRARY=$PWD/$build/ops/libikbo_ops.so \
    python3 -m pytest -q -p no:cacheprovider --junitxml="$build/reports/$name.xml" "$@"
}

# Several tests at a time, where pytest can.
parallel=()
python3 -c 'import xdist' 2>/dev/null && parallel=(-n 8)

test_step() {
  local test
  for test in "$build"/kernels/tests/*_test; do
    note "$(basename "$test")"
    timeout -s KILL 120 "$test" --gtest_brief=1 --gtest_output="xml:$build/reports/$(basename "$test").xml"
  done
  gpu_pytest operators "${parallel[@]}" "${OPERATOR_TESTS[@]}"
}

# A kernel's small tests under a sanitizer, in several processes at a time: racecheck takes fifty times as long as the test.
sanitized() {
  local tool=$1 test=$2 processes most number failed=0 pids=()
  # None without a test: the tools take a program that never reaches the GPU for a failure.
  processes=$("$test" --gtest_list_tests --gtest_filter='*Small*' | grep -c '^  ')
  most=$(($(nproc) / 2 < 10 ? 10 : $(nproc) / 2))
  processes=$((processes < most ? processes : most))
  for ((number = 0; number < processes; ++number)); do
    GTEST_TOTAL_SHARDS=$processes GTEST_SHARD_INDEX=$number timeout -s KILL 300 \
      compute-sanitizer --tool "$tool" --error-exitcode 1 "$test" --gtest_brief=1 --gtest_filter='*Small*' \
      --gtest_output="xml:$build/reports/$tool-$(basename "$test").$number.xml" &
    pids+=($!)
  done
  for number in "${pids[@]}"; do wait "$number" || failed=1; done
  return "$failed"
}

sanitize_step() {
  local tool
  for tool in memcheck racecheck synccheck; do
    note "compute-sanitizer --tool $tool on the kernels' small tests"
    for test in "$build"/kernels/tests/*_gpu_test; do sanitized "$tool" "$test"; done
  done
  note "compute-sanitizer --tool memcheck on the operators"
  # PyTorch's caching allocator would hide reads beyond a tensor inside a block that it keeps.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 IKBO_TEST_DEVICE=cuda IKBO_LIBRARY=$PWD/$build/ops/libikbo_ops.so \
    timeout -s KILL 580 compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all \
    python3 -m pytest -q -p no:cacheprovider -x "${parallel[@]}" -k "${SELECT:-wrong or agrees or any_strides or gradients}" \
    --junitxml="$build/reports/memcheck-operators.xml" \
    tests/python/test_cuda.py tests/python/test_compression.py tests/python/test_attention.py \
    tests/python/test_self_attention.py tests/python/test_ops_values.py
}

bench_step() {
  IKBO_LIBRARY=$PWD/$build/ops/libikbo_ops.so python3 bench/odd_sizes.py --json "$out/odd_sizes.json"
  python3 bench/ranker_gpu.py --ikbo "$build/cli/ikbo" --library "$build/ops/libikbo_ops.so" --json "$out/ranker_gpu.json"
}

mkdir -p "$build/reports" "$out"
export PYTHONWARNINGS=ignore
trap 'python3 scripts/gpu_report.py "$build/reports" "$out/checks.json" "$(scripts/source_digest.sh checks)"' EXIT
for step in "${steps[@]}"; do
  [[ $step =~ ^(build|test|sanitize|bench)$ ]] || die "unknown step '$step': build, test, sanitize, bench"
  step "Step $step"
  "${step}_step"
done
