#!/bin/bash
# The C++ tests, among them runs of every CPU kernel, with all of our code under AddressSanitizer and UndefinedBehaviorSanitizer:
# once with the instructions of this machine, once with the portable kernels.
#   tests/cpp/sanitize.sh [python with torch] [build directory]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-python3}
build=${2:-$root/build/sanitize}

cmake -S "$root" -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DFLASH_ATTN_EXT_CUDA=OFF -DFLASH_ATTN_EXT_TESTS=ON -DFLASH_ATTN_EXT_SANITIZE=ON
cmake --build "$build" --target cpp_tests

export UBSAN_OPTIONS=print_stacktrace=1
"$build/tests/cpp/cpp_tests" --gtest_brief=1
FLASH_ATTN_EXT_ISA=portable "$build/tests/cpp/cpp_tests" --gtest_brief=1
