#!/bin/sh
# The kernel tests under AddressSanitizer and UBSan: tests/kernels/asan.sh [pytest arguments]
set -e
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
PACELINE_BUILD_DIR=$(mktemp -d)
export PACELINE_BUILD_DIR
trap 'rm -rf "$PACELINE_BUILD_DIR"' EXIT
$python src/paceline/kernels/build.py --sanitize
cxx=${CXX:-g++}
# Python itself is not instrumented, so its leaks are not ours to report.
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    $python -m pytest tests/kernels --ignore=tests/kernels/gpu tests/models/test_native.py tests/engine/test_native_round.py \
    tests/models/test_native_adapters.py tests/models/parallel/test_native.py tests/models/test_recurrent.py tests/models/test_recurrent_bits.py tests/drafters/test_mtp.py \
    tests/drafters/test_lookup.py tests/drafters/test_native_head.py -p no:cacheprovider -q --timeout=1200 "$@"
