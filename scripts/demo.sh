#!/usr/bin/env bash
# From a clean clone to ranked films: installs what is needed, builds the library and the command, trains a public
# PyTorch ranking model on MovieLens-100K, and scores real users' candidates with one row a user instead of a copy for
# every candidate; then the same with a compute-heavy model. Neither a GPU nor a CUDA toolkit is needed. Everything lands
# in .venv and build; a second run makes only what has changed.
#
# usage: scripts/demo.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

readonly DEMO=build/demo
readonly IKBO=build/release/cli/ikbo
readonly USER_SIDE='user_*,hist_*'

# show COMMAND...: prints the command as one would type it, then runs it.
show() {
  local word line=''
  for word in "$@"; do
    [[ $word == *[*\ ]* ]] && word="'$word'"
    line+=" $word"
  done
  printf '   $%s\n' "$line"
  "$@"
}

build() {
  local log=build/demo-build.log
  mkdir -p build
  cmake --preset release >"$log" 2>&1 || { cat "$log" >&2 && die "configuring failed, see above"; }
  cmake --build --preset release --target ikbo ikbo_ops
}

# The specification is long: its beginning shows what it is.
spec_head() {
  local shown=24 text more
  text=$(show "$IKBO" spec "$DEMO/din.ikbo.pt2")
  head -n "$shown" <<<"$text"
  more=$(($(wc -l <<<"$text") - shown))
  if ((more > 0)); then
    note "... and $more lines more"
  fi
}

main() {
  if (($#)); then
    usage
    [[ $1 == -h || $1 == --help ]] && exit
    die "unknown argument: $1"
  fi

  step "Setup: what is missing from Debian and PyPI"
  scripts/setup.sh

  step "Build: the operators (libikbo_ops.so) and the command (ikbo), C++ only"
  build

  step "Train: torch-rechub's DIN, class unmodified, on MovieLens-100K; about a minute"
  show .venv/bin/python examples/movielens/train.py --out "$DEMO"

  step "Export: an ordinary archive of torch.export, and 15 users with 70 candidate films each"
  show .venv/bin/python examples/movielens/export.py --out "$DEMO"

  step "Transform: from here on only C++. Each user is one row; the report says what every operator needed for that"
  show "$IKBO" transform "$DEMO/din.pt2" --request-only "$USER_SIDE" -o "$DEMO/din.ikbo.pt2" --report

  step "Verify: the same scores as the original on random inputs, both measured against float64"
  show "$IKBO" verify "$DEMO/din.pt2" "$DEMO/din.ikbo.pt2"

  step "Specification: which of the two batch sizes every operator follows, and its range"
  spec_head

  step "Score: 15 real users, 70 candidates each; for the first one the history (newest last) and the ten best films"
  show "$IKBO" score "$DEMO/din.ikbo.pt2" --requests "$DEMO/requests.json" --top 10 --show 1

  step "Compare: three ways to run the same model in one process: time, bytes of copied users, AUC, score differences"
  note "AUC over all pairs of user and candidate of $DEMO/requests.json. A user's candidates: the next films the user"
  note "rated, at most 20 of the held-out last fifth (label 1), and films the user never rated, drawn evenly (label 0)."
  note "popularity ranks the same candidates by their number of ratings outside the held-out part."
  show "$IKBO" bench model "$DEMO/din.pt2" --request-only "$USER_SIDE" --requests "$DEMO/requests.json"

  step "A compute-heavy model: history encoder, target attention, linear compression; random weights"
  show .venv/bin/python examples/ranker.py --config small --out "$DEMO/ranker"
  show "$IKBO" transform "$DEMO/ranker/ranker.pt2" --request-only "$USER_SIDE" -o "$DEMO/ranker/ranker.ikbo.pt2" --report
  show "$IKBO" verify "$DEMO/ranker/ranker.pt2" "$DEMO/ranker/ranker.ikbo.pt2"
  show "$IKBO" bench model "$DEMO/ranker/ranker.pt2" --request-only "$USER_SIDE" \
    --requests "$DEMO/ranker/requests.json" --runs 10 --seconds 3

  step "Done. Your own model: export it as examples/movielens/export.py does, then transform, verify, score"
}

main "$@"
