#!/bin/sh
# Install the official Python client into its own virtual environment in the cache outside the tree,
# at the versions and hashes of bench/requirements.lock, and again when these change. `make bench`
# and its test compare Fairlead with it.
set -eu
cd "$(dirname "$0")/.."
. tools/cache.sh
lock=bench/requirements.lock
fill() { environment "$1" "$lock"; }
works() { "$1/bin/python" -c 'import kubernetes'; }
cached official-client "$(cat "$lock")"
