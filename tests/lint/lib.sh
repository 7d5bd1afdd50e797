# shellcheck shell=bash
# Shared by the gates that are shell scripts. Sourced, never run. Leaves the root of the tree as the current folder.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

# files PATTERN...: those that are or could be committed, each ended by a zero byte.
files() {
  local file
  git ls-files -z --cached --others --exclude-standard -- "$@" |
    while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done
}

# scripts PATTERN: those whose first line matches, each ended by a zero byte.
scripts() {
  # shellcheck disable=SC2016
  files '*' | xargs -0 awk -v pattern="$1" 'FNR == 1 && $0 ~ pattern { printf "%s%c", FILENAME, 0 } { nextfile }'
}

# need PROGRAM: ends a gate, as skipped, where a program is not installed.
need() {
  command -v "$1" > /dev/null && return
  echo "$1 is not installed (deploy/bootstrap --lint)"
  exit 77
}
