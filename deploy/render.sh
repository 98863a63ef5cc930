#!/bin/sh
# Render the plain manifests from the chart, one for each way to run Fairlead: sh deploy/render.sh FOLDER
# The kinds AddressPool and AddressGrant are not in them: deploy/crds has these as plain manifests already.
set -eu
into="$(cd "$1" && pwd)"
cd "$(dirname "$0")/chart/fairlead"
PATH="${XDG_CACHE_HOME:-$HOME/.cache}/fairlead/bin:$PATH"
draft="$(mktemp -d)"
trap 'rm -rf "$draft"' EXIT
for name in controller gateways no-kube-proxy tunnels; do
    values="ci/$name-values.yaml"
    # Not `2>&1`: helm remarks on the symbolic link to the CRDs.
    helm template fairlead . --namespace fairlead-system --kube-version 1.36.0 --values "$values" \
        >"$draft/rendered" 2>"$draft/said" || { cat "$draft/said" >&2; exit 1; }
    {
        sed -n '/^#/!q; p' "$values"
        echo "# Made by \`make manifests\` from deploy/chart/fairlead: change that, not this."
        sed '/^# Source: /d' "$draft/rendered"
    } >"$into/$name.yaml"
done
