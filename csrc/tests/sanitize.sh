#!/bin/sh
# Builds the native tests with sanitizers and runs them; any report fails.
set -eu
cd "$(dirname "$0")/../.."
for sanitizers in address,undefined thread; do
  build=build/sanitize-$sanitizers
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMAGICPIG_PYTHON=OFF -DMAGICPIG_TESTS=ON \
    -DMAGICPIG_SANITIZE=$sanitizers >"$build.log" 2>&1 && ninja -C "$build" >>"$build.log" 2>&1 || {
    cat "$build.log" >&2
    exit 1
  }
  echo "native tests under -fsanitize=$sanitizers"
  for test in native_test scan_test linear_test prompt_test step_test; do
    "$build/$test"
  done
done
