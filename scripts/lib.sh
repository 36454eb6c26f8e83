# shellcheck shell=bash
# Shared by the scripts of this folder: source it after `set -euo pipefail`.

# step TEXT: announces what comes next, with the seconds since the script began.
step() {
  printf '\n== [%4d s] %s\n' "$SECONDS" "$*"
}

# note TEXT: a detail of the current step.
note() {
  printf '   %s\n' "$*"
}

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# usage: prints the comment at the top of the calling script of this folder; the working directory is the repository.
usage() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "scripts/${0##*/}"
}
