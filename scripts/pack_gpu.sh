#!/usr/bin/env bash
# Packs what scripts/gpu_check.sh needs besides PyTorch, CMake, ninja and nvcc into a folder to take along to a GPU machine
# that reaches no network: headers of CLI11 and nlohmann-json, sources of GoogleTest. About 5 MB.
#
# usage: scripts/pack_gpu.sh [FOLDER]      default: .gpu, which git ignores
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

folder=${1:-.gpu}
scripts/setup.sh --tests
rm -rf "$folder"
mkdir -p "$folder/include" "$folder/share/cmake"
for package in CLI nlohmann; do
  cp -r "/usr/include/$package" "$folder/include/"
done
for package in CLI11 nlohmann_json; do
  config=$(find /usr/share/cmake /usr/lib -type d -name "$package" -path '*cmake*' -print -quit)
  [[ -n $config ]] || die "no CMake configuration of $package was found under /usr"
  cp -r "$config" "$folder/share/cmake/"
done
cp -r /usr/src/googletest "$folder/googletest"
note "packed: $(du -sh "$folder" | cut -f 1) in $folder; on the GPU machine: scripts/gpu_check.sh"
