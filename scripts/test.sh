#!/usr/bin/env bash
# Every test that runs without a GPU, from a clean clone: installs what is missing, builds, and checks
#   format     clang-format on every C++ and CUDA file
#   C++        GoogleTest through CTest
#   CUDA       compiles every kernel for sm_90a and the CUDA operators, where nvcc exists, and tests their host code
#   Python     pytest: operators, archives, runtime, command, transform, the demo's data
#   zoo        public models of torch-rechub, exported unchanged: transformed raw and functional, verified, loaded
#   random     250 random programs, transformed in three modes and compared with their originals
#   sanitize   the C++ tests of archives, transform and runtime, and the fuzzer of the archive reader, under the address
#              and undefined-behaviour sanitizers
#
# usage: scripts/test.sh [STAGE...]      all stages without arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

readonly STAGES=(format cpp cuda python zoo random sanitize)
readonly PYTHON=.venv/bin/python
jobs=$(nproc)
readonly jobs

format_stage() {
  local files
  mapfile -t files < <(git ls-files '*.cc' '*.cpp' '*.h' '*.cu' '*.cuh')
  clang-format --dry-run --Werror "${files[@]}" || die "format them: clang-format -i FILE"
  note "${#files[@]} files are formatted"
}

configure_and_build() {
  local preset=$1
  shift
  mkdir -p build
  cmake --preset "$preset" >"build/$preset-configure.log" 2>&1 ||
    { cat "build/$preset-configure.log" >&2 && die "configuring failed, see above"; }
  cmake --build --preset "$preset" "$@" -- -j"$jobs"
}

cpp_stage() {
  configure_and_build tests
  ctest --test-dir build/tests --output-on-failure -j"$jobs"
}

cuda_stage() {
  if ! command -v nvcc >/dev/null 2>&1; then
    note "no nvcc on the PATH: kernels are not compiled"
    return
  fi
  # From here on this build folder has them: the Python tests show that a machine without a GPU can load them.
  cmake --preset tests -DIKBO_CUDA=ON -DIKBO_KERNELS_CHECKS=ON >build/tests-configure.log 2>&1 ||
    { cat build/tests-configure.log >&2 && die "configuring with CUDA failed, see above"; }
  cmake --build --preset tests -- -j"$jobs" | tee build/cuda-build.log
  # The compiler only mentions it where it cannot let matrix products run beside other work, at half their rate.
  if grep -q C7520 build/cuda-build.log; then
    find build/tests/kernels -name '*.cu.o' -delete  # so that it is said again
    die "the compiler serialises the products of these kernels: $(sed -n "s/.*C7520.*function '\(.*\)'/\1/p" build/cuda-build.log | sort -u | c++filt)"
  fi
  build/tests/kernels/tests/linear_compression_config_test
}

pytest_with_binaries() {
  IKBO=$PWD/build/tests/cli/ikbo IKBO_LIBRARY=$PWD/build/tests/ops/libikbo_ops.so \
    IKBO_RUN_ARCHIVE=$PWD/build/tests/tests/runtime/ikbo_run_archive \
    IKBO_ARCHIVE_TOOL=$PWD/build/tests/tests/graph/ikbo_archive_tool \
    IKBO_CHECK_PROGRAMS=$PWD/build/tests/tests/transform/ikbo_check_programs \
    CXX=g++ "$PYTHON" -m pytest -q -p no:cacheprovider "$@"
}

# Most of a test is Python of one thread and commands of its own: a worker a core, each with one thread where a test does
# not say otherwise. A worker takes about 1 GB.
python_stage() {
  configure_and_build tests
  OMP_NUM_THREADS=1 pytest_with_binaries -n "$((jobs < 16 ? jobs : 16))" --dist worksteal tests/python \
    --ignore=tests/python/test_random_programs.py
}

# IKBO_ZOO=no leaves it out; scripts/zoo.sh runs all of it.
zoo_stage() {
  if [[ ${IKBO_ZOO:-yes} == no ]]; then
    note "left out (IKBO_ZOO=no)"
    return
  fi
  configure_and_build tests --target ikbo ikbo_ops ikbo_run_archive
  scripts/zoo.sh --prepared --only rechub --no-measure --no-table --quick --strict --again \
    --models 'WideDeep;DeepFM;DCN;DCNv2 full crossnet;AFM;AutoInt;DeepFFM;BST;DIN;DIN softmax;MMOE;ESMM;AITM;DSSM;STAMP;ComirecSA;FiBiNet field_each'
}

random_stage() {
  configure_and_build tests
  IKBO_RANDOM_PROGRAMS=${IKBO_RANDOM_PROGRAMS:-250} pytest_with_binaries -s tests/python/test_random_programs.py
}

sanitize_stage() {
  # Not those of the command, which print what the tested parts say and take a fifth of the time to build.
  configure_and_build sanitize --target ikbo_archive_test ikbo_transform_test ikbo_runtime_test ikbo_fuzz_archive
  # Leaks are not checked: PyTorch keeps memory to the end of the process.
  ASAN_OPTIONS=detect_leaks=0 ctest --test-dir build/sanitize --output-on-failure -j"$jobs" -E ikbo_cli_test_NOT_BUILT
}

main() {
  local stage wanted=("$@")
  ((${#wanted[@]})) || wanted=("${STAGES[@]}")
  for stage in "${wanted[@]}"; do
    [[ " ${STAGES[*]} " == *" $stage "* ]] || die "unknown stage '$stage': ${STAGES[*]}"
  done
  scripts/setup.sh --tests
  for stage in "${wanted[@]}"; do
    step "Stage $stage"
    "${stage}_stage"
  done
  step "All stages passed: ${wanted[*]}"
}

main "$@"
