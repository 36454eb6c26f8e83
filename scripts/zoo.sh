#!/usr/bin/env bash
# Public ranking models from four packages, exported unchanged, transformed, verified and measured: docs/zoo.md and
# bench/results/cpu/zoo.json. Each package gets a folder of its own under build/zoo/site, since their needs conflict.
# What is done already is kept: run it again after an interruption. A full run takes about an hour on two cores.
#
# usage: scripts/zoo.sh [--only PACKAGE[,PACKAGE]] [--models NAME[;NAME]] [--match TEXT] [--no-measure] [--no-table]
#                       [--again] [--strict] [--quick] [--seconds S] [--jobs N] [--prepared]
#   --only       packages: rechub, deepctr, recbole, fuxictr
#   --models     exactly these configurations;  --match: those whose name holds the text
#   --no-measure checks alone;  --no-table: docs/zoo.md stays
#   --again      what is current is done again;  --strict: exit code 1 if a check failed
#   --quick      request-only arithmetic is not counted, which takes longest
#   --seconds    of measuring each configuration;  --jobs: configurations checked at the same time
#   --prepared   everything is installed and built already
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

readonly PYTHON=.venv/bin/python SITE=build/zoo/site ARCHIVES=build/zoo/archives
readonly YAML=pyyaml==6.0.2
export OMP_NUM_THREADS=1
export IKBO=$PWD/build/tests/cli/ikbo IKBO_LIBRARY=$PWD/build/tests/ops/libikbo_ops.so
export IKBO_RUN_ARCHIVE=$PWD/build/tests/tests/runtime/ikbo_run_archive

# install PACKAGE REQUIREMENT...: nothing but these, and only where they are not there yet.
install() {
  local folder=$SITE/$1 stamp=$SITE/$1.stamp
  shift
  [[ -f $stamp && $(<"$stamp") == "$*" ]] && return
  note "installing $* into $folder"
  rm -rf "$folder"
  # --ignore-requires-python: fuxictr 1.2.2 says 3.6, and runs with today's.
  "$PYTHON" -m pip --disable-pip-version-check --no-input install -q --no-deps --no-compile --ignore-requires-python \
    --target "$folder" "$@"
  printf '%s' "$*" >"$stamp"
}

# torch-rechub and recbole are in .venv already (requirements-demo.txt).
install_package() {
  mkdir -p "$SITE"
  case $1 in
    rechub) ;;
    deepctr) install deepctr deepctr-torch==0.3.0 ;;
    recbole) install recbole "$YAML" colorama==0.4.6 colorlog==4.7.2 texttable==1.7.0 psutil==7.0.0 tabulate==0.9.0 ;;
    fuxictr) install fuxictr fuxictr==1.2.2 "$YAML" ;;
    *) die "unknown package '$1': rechub, deepctr, recbole, fuxictr" ;;
  esac
}

main() {
  local packages=rechub,deepctr,recbole,fuxictr export_options=() run_options=() measure=(--measure) prepared=no
  local table=(--table docs/zoo.md bench/results/cpu/zoo.json)
  while (($#)); do
    case $1 in
      --only) packages=$2 && shift ;;
      --models) export_options+=(--names "$2") && run_options+=(--names "$2") && shift ;;
      --match) export_options+=(--only "$2") && run_options+=(--only "$2") && shift ;;
      --seconds | --jobs) run_options+=("$1" "$2") && shift ;;
      --no-measure) measure=() ;;
      --no-table) table=() ;;
      --again | --strict | --quick) run_options+=("$1") ;;
      --prepared) prepared=yes ;;
      -h | --help) usage && exit ;;
      *) usage >&2 && die "unknown argument: $1" ;;
    esac
    shift
  done
  if [[ $prepared == no ]]; then
    scripts/setup.sh --tests
    step "Building"
    mkdir -p build && cmake --preset tests >build/tests-configure.log
    cmake --build --preset tests --target ikbo ikbo_ops ikbo_run_archive -- -j"$(nproc)"
  fi
  local package
  for package in ${packages//,/ }; do
    step "Exporting $package"
    install_package "$package"
    PYTHONPATH=$SITE/$package "$PYTHON" examples/zoo/export.py "$package" "$ARCHIVES/$package" "${export_options[@]}"
  done
  step "Transforming, verifying, measuring"
  "$PYTHON" examples/zoo/zoo.py "$ARCHIVES" --packages "$packages" --check "${measure[@]}" "${table[@]}" "${run_options[@]}"
}

main "$@"
