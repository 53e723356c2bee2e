#!/usr/bin/env bash
# Installs into a virtual environment: tools/install.sh PYTHON --constraint FILE WHAT...
# Where there is no NVIDIA driver, torch comes first, alone, from TORCH_INDEX: an index that does not answer costs seconds a package.
set -uo pipefail
python=$1
shift
pip() { "$python" -m pip --disable-pip-version-check install --quiet "$@"; }
log=$(dirname "$python")/../pip.log
if [ -n "${TORCH_INDEX:-}" ] && [ ! -e /proc/driver/nvidia/version ]; then
    pip --no-deps --retries 0 --timeout 10 --index-url "$TORCH_INDEX" "$1" "$2" torch 2>"$log" || true
fi
pip "$@" 2>"$log" && exit 0
# pip's pages of retries, in one sentence; anything else that it says stands as it is.
if grep -q "after connection broken by" "$log"; then
    echo "pip reaches no package index, so nothing was installed: connect this machine and say it again, or bring a kit (make kit, on one that is connected); pip's own words are in $log" >&2
else
    cat "$log" >&2
fi
exit 1
