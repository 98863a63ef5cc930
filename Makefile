# make setup   install what is missing, for those who change Fairlead: Debian packages, uv, virtual environment, eBPF objects, and the real OpenStack of the tests (into ~/.cache/fairlead, once, minutes); safe to repeat
# make base    of that what Fairlead itself needs, without OpenStack; the targets below do what they need themselves
# make demo    the main job, shown with packets; needs root
# make test    everything: types, lint, unit tests, real packets; needs root; as many tests side by side as there are processors, WORKERS=1: one after the other
# make tools   setup, and what else the tests need: kube-apiserver, kube-proxy, etcd and helm (built once from their Go modules, minutes), Debian's older etcd, the official Python client; into ~/.cache/fairlead; wrk, nginx, HAProxy, iperf3 from Debian
# make histories   200 random histories of class octavia at a real Octavia, of which make test has four
# make manifests   render deploy/manifests anew from the chart
# make bench   packets, a lab beside other balancers, HAProxy, a live gateway, a large cluster, floods of health ports, Octavia; tables here, plots into docs/performance; 58 minutes, 2 GB of disk
# make lock    resolve the dependencies anew into requirements.lock
.DEFAULT_GOAL := help
.PHONY: help setup base tools root demo test histories lint manifests bench lock clean
PYTHON ?= python3
WORKERS ?= auto
VENV := .venv
UV := build/tools/bin/uv

help:
	@sed -n 's/^# //p' Makefile

base:
	@sh setup.sh

# Tests that need what cannot be had say so themselves.
setup: base
	@sh tools/openstack.sh || echo "setup: no OpenStack: see above" >&2

root:
	@[ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): this needs root: it makes network namespaces, loads eBPF and writes" \
	"nftables rules in them. Run it as root. Without root: make base, then .venv/bin/fairlead plan -f examples/plan" >&2; exit 1; }

demo: root base
	$(VENV)/bin/fairlead demo

lint: base
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

tools: setup
	@sh tools/etcd.sh || echo "setup: Debian's etcd is missing: see above" >&2
	@sh tools/build.sh etcd || echo "setup: no etcd: see above" >&2
	@sh tools/build.sh kubernetes || echo "setup: no kube-apiserver and kube-proxy: see above" >&2
	@sh tools/official.sh || echo "setup: no official Python client: see above" >&2
	@sh tools/build.sh helm || echo "setup: no helm: see above" >&2
	@sh tools/bench.sh || echo "setup: not all that the benchmarks measure with: see above" >&2

test: root lint tools
	$(VENV)/bin/pytest -n $(WORKERS) --durations 40 --durations-min 3

histories: root tools
	$(VENV)/bin/pytest --histories 200 tests/drivers/octavia/test_histories.py

manifests: tools
	sh deploy/render.sh deploy/manifests

bench: root tools
	@sh tools/build.sh occm || echo "setup: no cloud-provider-openstack to measure beside: see above" >&2
	$(VENV)/bin/python -m bench.packets --plots docs/performance
	$(VENV)/bin/python -m bench.lab --plots docs/performance
	$(VENV)/bin/python -m bench.proxy --plots docs/performance
	$(VENV)/bin/python -m bench.live --plots docs/performance
	$(VENV)/bin/python -m bench.scale
	$(VENV)/bin/python -m bench.nodes
	$(VENV)/bin/python -m bench.health_flood
	$(VENV)/bin/python -m bench.octavia --services 10

lock: base
	$(UV) pip compile pyproject.toml --extra octavia --group dev --universal --generate-hashes --no-header --python-version 3.11 --upgrade -o requirements.lock
	$(UV) pip compile bench/requirements.in --universal --generate-hashes --no-header --python-version 3.11 --upgrade -o bench/requirements.lock
	$(UV) pip compile tests/openstack/requirements.in --universal --generate-hashes --no-header --python-version 3.11 --upgrade -o tests/openstack/requirements.lock

clean:
	rm -rf build .venv src/fairlead/objects
