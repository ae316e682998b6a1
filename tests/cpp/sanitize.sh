#!/bin/bash
# The C++ tests and a short run of the operator from Python, all of our code under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/cpp/sanitize.sh [python with torch and pytest] [build directory]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-python3}
build=${2:-$root/build/sanitize}

cmake -S "$root" -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DFLASH_ATTN_EXT_CUDA=OFF -DFLASH_ATTN_EXT_TESTS=ON -DFLASH_ATTN_EXT_SANITIZE=ON
cmake --build "$build"

# torch and Python leave their own memory at exit, and torch is not instrumented.
export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1
"$build/tests/cpp/cpp_tests" --gtest_brief=1
LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)" \
  PYTHONPATH="$build/python" "$python" "$root/tests/cpp/sanitize.py"
