# shellcheck shell=bash
# Shared by deploy/bootstrap, deploy/quickstart, tests/run and tests/bench/run. Sourced, never run.
# Leaves: ROOT (the checkout), JOBS, BUILD_SECONDS (spent in `build` so far), and the functions below.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${GRADWIRE_JOBS:-$(nproc)}
BUILD_SECONDS=0
# GRADWIRE_UNITY=N: N source files are compiled as one, and foreign headers are parsed once, for builds from nothing
# (the sanitizer presets: half of the time); then one changed file compiles N.
# Objects of one checkout serve another: paths below ROOT are hashed relative to it.
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=true CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-time_macros}

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# show_last: shows the lines of a build in one line of a terminal.
show_last() { stdbuf -o0 tr '\n' '\r' >&2; printf '\n' >&2; }

# every_minute: reads the lines of a build, and says once a minute how far it is.
every_minute() {
  local line told=$SECONDS
  while IFS= read -r line; do
    [[ $((SECONDS - told)) -ge 60 && $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    printf '    %s of %s steps are built\n' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" >&2
    told=$SECONDS
  done
}

# build PRESET TARGET...: configures once, then builds; says how far it is, and shows the log if it fails.
build() {
  local preset=$1; shift
  local dir=$ROOT/build/$preset log=$ROOT/build/$preset.log began=$SECONDS
  mkdir -p "$ROOT/build"
  local python=$ROOT/.venv/bin/python args=()
  if [[ $preset = release || $preset = lint ]] && [ -x "$python" ]; then
    args+=(-DGRADWIRE_PYTHON=ON "-DPython3_EXECUTABLE=$python"
           "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)")
  fi
  # Lint looks at every source by itself.
  if [[ -n ${GRADWIRE_UNITY:-} && $preset != lint ]]; then
    args+=(-DGRADWIRE_PRECOMPILE=ON -DCMAKE_UNITY_BUILD=ON "-DCMAKE_UNITY_BUILD_BATCH_SIZE=$GRADWIRE_UNITY")
  fi
  say "building ($preset: $*); log in build/$preset.log"
  (cd "$ROOT" && cmake --preset "$preset" "${args[@]}") > "$log" 2>&1 || { tail -30 "$log" >&2; die "cmake failed; see $log"; }
  trap 'die "interrupted; what was built stays: the same command goes on from there"' INT
  local show=every_minute
  [ ! -t 2 ] || show=show_last
  (cd "$ROOT" && cmake --build "$dir" -j "$JOBS" --target "$@") 2>&1 | tee -a "$log" | $show ||
    { tail -40 "$log" >&2; die "build failed; see $log"; }
  trap - INT
  BUILD_SECONDS=$((BUILD_SECONDS + SECONDS - began))
}
