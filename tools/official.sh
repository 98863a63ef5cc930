#!/bin/sh
# Install the official Python client into its own virtual environment in the cache outside the tree,
# at the versions and hashes of bench/requirements.lock, and again when these change. `make bench`
# and its test compare Fairlead with it.
set -eu
cd "$(dirname "$0")/.."
place="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/official-client"
lock=bench/requirements.lock
uv=build/tools/bin/uv
! cmp -s "$lock" "$place/.requirements" || exit 0
printf 'setup: installing the official Python client into %s\n' "$place"
export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=true
"$uv" venv --quiet --clear --python "$(command -v python3)" "$place"
"$uv" pip sync --quiet --python "$place/bin/python" --require-hashes "$lock"
cp "$lock" "$place/.requirements"
