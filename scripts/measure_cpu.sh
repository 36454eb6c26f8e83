#!/usr/bin/env bash
# Measures the demo's models as `broadcast`, `split` and `ikbo`, and writes bench/results/cpu/NAME.json. Needs what
# scripts/demo.sh has made. Let nothing else run meanwhile.
#
# usage: scripts/measure_cpu.sh NAME...
#   NAME: model (DIN on MovieLens-100K), ranker (examples/ranker.py, `small`)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

readonly DEMO=build/demo
readonly IKBO=build/release/cli/ikbo
readonly RESULTS=bench/results/cpu

# bench OUT ARCHIVE [OPTION...]
bench() {
  local out=$1 archive=$2
  shift 2
  [[ -x $IKBO && -f $archive ]] || die "$IKBO or $archive is missing: run scripts/demo.sh first"
  "$IKBO" bench model "$archive" --request-only 'user_*,hist_*' "$@" -o "$out"
}

# write NAME MODEL RUN...: one file of the outputs of several runs, with where and on what sources they were measured.
write() {
  .venv/bin/python - "$1" "$2" "$(scripts/source_digest.sh "$1")" "$RESULTS/$1.json" "${@:3}" <<'PYTHON'
import datetime, json, os, re, sys
import torch

name, model, digest, out, *runs = sys.argv[1:]
results = [json.load(open(run)) for run in runs]
info = open("/proc/cpuinfo").read()
cpu = re.search(r"model name\s*:\s*(.*)", info).group(1)
vector = next((text for flag, text in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if f" {flag} " in info), "no AVX2")
rows = [
    {"case": {**row["case"], "model": model, "dtype": "fp32"}, **{k: v for k, v in row.items() if k != "case"}, "runs": result["runs"]}
    for result in results
    for row in result["rows"]
]
file = {
    "gpu": None, "cpu": f"{cpu}, {os.cpu_count()} cores ({vector})", "driver": None, "torch": torch.__version__, "cuda": None,
    "date": datetime.date.today().isoformat(), "source_digest": digest, "threads": results[0]["threads"],
    "runs": results[0]["runs"], "operator_overhead_ns": results[0]["operator_overhead_ns"], "rows": rows,
    "baselines": results[0]["baselines"],
}
with open(out, "w") as target:
    json.dump(file, target, indent=1)
    target.write("\n")
print(f"   {out}: {len(rows)} rows")
PYTHON
}

measure() {
  local work
  work=$(mktemp -d)
  case $1 in
    model)
      bench "$work/15.json" "$DEMO/din.pt2" --requests "$DEMO/requests.json" --seconds 20
      write model din "$work/15.json"
      ;;
    ranker)
      bench "$work/15.json" "$DEMO/ranker/ranker.pt2" --requests "$DEMO/ranker/requests.json" --seconds 20
      step "Peak memory: 4,096 candidates of one user"
      bench "$work/1.json" "$DEMO/ranker/ranker.pt2" --users 1 --candidates 4096 --runs 3 --seconds 1
      write ranker small "$work/15.json" "$work/1.json"
      ;;
    *) usage && die "unknown name: $1" ;;
  esac
  rm -r "$work"
}

(($#)) || { usage && exit 2; }
[[ $1 == -h || $1 == --help ]] && usage && exit
mkdir -p "$RESULTS"
for name in "$@"; do
  step "Measure: $name"
  measure "$name"
done
