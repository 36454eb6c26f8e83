#!/usr/bin/env bash
# Installs what building ikbo needs: Debian packages (as root or through sudo) and .venv with pinned Python packages.
# Does only what is missing: when nothing is, it is done at once. Neither a GPU nor a CUDA toolkit is needed.
#
# usage: scripts/setup.sh [--tests]
#   --tests     also what scripts/test.sh needs
#   PYTHON=...  in the environment: the Python (3.10 to 3.13) to make .venv from
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

readonly STAMP=.venv/ikbo-setup.stamp
readonly REQUIREMENTS=(requirements.txt requirements-demo.txt)

has() { command -v "$1" >/dev/null 2>&1; }

has_header() {
  compgen -G "/usr/include/$1" >/dev/null || compgen -G "/usr/local/include/$1" >/dev/null
}

# Prints the first Python of a version that PyTorch 2.11 and the pinned packages support and that can make a venv.
find_python() {
  local candidate
  for candidate in ${PYTHON:-/usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.10}; do
    if has "$candidate" && "$candidate" -c \
      'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

has_python() { venv_works || find_python >/dev/null; }

# TorchInductor compiles against Python's own headers.
has_python_headers() {
  local python=.venv/bin/python
  venv_works || python=$(find_python) || return 1
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

venv_works() { [[ -x .venv/bin/python ]] && .venv/bin/python -c '' 2>/dev/null; }

# Prints the Debian packages that are missing. What was installed in another way counts as present.
missing_packages() {
  local with_tests=$1
  has g++ || echo g++
  has cmake || echo cmake
  has ninja || echo ninja-build
  has ccache || echo ccache
  has git || echo git
  has_python || echo python3-venv
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  if [[ $with_tests == yes ]]; then
    has_header gtest/gtest.h || echo libgtest-dev
    has_header benchmark/benchmark.h || echo libbenchmark-dev
    has clang-format || echo clang-format
    has unzip || echo unzip
    has_python_headers || echo python3-dev
  fi
}

install_packages() {
  local packages=("$@") as_root=()
  if [[ $(id -u) != 0 ]]; then
    has sudo || die "missing: ${packages[*]}. Install them as root (apt-get install ${packages[*]}) and run this again."
    as_root=(sudo)
  fi
  has apt-get || die "missing: ${packages[*]} (names of Debian packages). Install them and run this again."
  step "Installing from Debian: ${packages[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends -o Dpkg::Options::=--force-confold "${packages[@]}"
}

requirements_digest() { sha256sum "${REQUIREMENTS[@]}" | sha256sum | cut -d ' ' -f 1; }

install_python_packages() {
  local python
  if ! venv_works; then
    python=$(find_python) || die "no Python from 3.10 to 3.13 with venv was found. Name one: PYTHON=/path/to/python $0"
    step "Creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
  fi
  # Modules are compiled when first imported: only a few of PyTorch's thousands ever are.
  local pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install --no-compile)
  step "Installing PyTorch and the test tools (requirements.txt; about 3 GB to download, several minutes)"
  "${pip[@]}" -r requirements.txt
  step "Installing what the demo needs (requirements-demo.txt)"
  "${pip[@]}" --no-deps -r requirements-demo.txt
  requirements_digest >"$STAMP"
}

main() {
  local with_tests=no packages=()
  while (($#)); do
    case $1 in
      --tests) with_tests=yes ;;
      -h | --help) usage && exit ;;
      *) usage >&2 && die "unknown argument: $1" ;;
    esac
    shift
  done

  mapfile -t packages < <(missing_packages "$with_tests")
  if ((${#packages[@]})); then
    install_packages "${packages[@]}"
  else
    note "Debian packages: nothing is missing"
  fi
  if venv_works && [[ -f $STAMP && $(<"$STAMP") == "$(requirements_digest)" ]]; then
    note "Python packages: .venv is up to date"
  else
    install_python_packages
  fi
}

main "$@"
