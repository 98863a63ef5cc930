# make setup      install the missing dependencies of developers: Debian packages, uv, the virtual
#                 environment, the eBPF objects, and the real OpenStack of the tests (into
#                 ~/.cache/fairlead, once, minutes); safe to repeat; log: build/setup.log
# make base       the part of setup that Fairlead itself needs, without OpenStack; the targets below
#                 install their dependencies themselves
# make demo       compare Fairlead with three other setups, with real packets; needs root
# make check      lint, types, and every test that needs no lab and no built program, side by side;
#                 needs root, and only what `make base` installs; prints the failed parts and the
#                 skipped tests at the end
# make test       everything: lint, types, all tests, with real packets; needs root; runs as many
#                 tests in parallel as there are CPUs, with WORKERS=1 one after the other
# make tools      setup, and the other dependencies of the tests: kube-apiserver, kube-proxy, etcd
#                 and helm (built once from their Go modules, minutes), Debian's older etcd, the
#                 official Python client, all into ~/.cache/fairlead; wrk, nginx, HAProxy and iperf3
#                 from Debian
# make histories  run 200 random histories of class octavia at a real Octavia and of a node, kill the
#                 leader of an OVSDB cluster 200 times, and make 3,000 random changes to a lab, of
#                 which `make test` runs a few; takes hours
# make mutations  change the product in 40 small ways, and check that the tests detect each change
# make manifests  render deploy/manifests from the chart
# make bench      packets, a lab with other load balancers, HAProxy, a live gateway, a large
#                 cluster, floods of health ports, Octavia, OVSDB, OVN, announcements beside
#                 MetalLB; prints tables, writes plots to docs/performance; over an hour, 2 GB of
#                 disk
# make lock       resolve the dependencies again and write requirements.lock
.DEFAULT_GOAL := help
.PHONY: help setup base tools root demo check test histories mutations lint manifests bench lock
.PHONY: clean
PYTHON ?= python3
WORKERS ?= auto
VENV := .venv
UV := build/tools/bin/uv
STEP := sh tools/step.sh
COMPILE := $(UV) pip compile --universal --generate-hashes --no-header --python-version 3.11 \
	--upgrade

help:
	@sed -n 's/^# //p' Makefile

base:
	@$(STEP) base sh setup.sh

# If a dependency cannot be installed, the tests that need it report that themselves.
setup: base
	@$(STEP) openstack sh tools/openstack.sh || echo "setup: no OpenStack: see above" >&2

root:
	@[ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): this needs root: it creates network" \
	"namespaces, loads eBPF and writes nftables rules in them. Run it as root. Without root:" \
	"make base, then .venv/bin/fairlead plan -f examples/plan" >&2; exit 1; }

demo: root base
	$(VENV)/bin/fairlead demo

lint: base
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

tools: setup
	@$(STEP) debian-etcd sh tools/etcd.sh || echo "setup: Debian's etcd is missing: see above" >&2
	@$(STEP) etcd sh tools/build.sh etcd || echo "setup: no etcd: see above" >&2
	@$(STEP) kubernetes sh tools/build.sh kubernetes || \
		echo "setup: no kube-apiserver and kube-proxy: see above" >&2
	@$(STEP) official-client sh tools/official.sh || \
		echo "setup: no official Python client: see above" >&2
	@$(STEP) helm sh tools/build.sh helm || echo "setup: no helm: see above" >&2
	@$(STEP) bench sh tools/bench.sh || \
		echo "setup: programs of the benchmarks are missing: see above" >&2

check: root base
	@$(VENV)/bin/python tools/check.py -q --check -n $(WORKERS)

test: root lint tools
	$(VENV)/bin/pytest -n $(WORKERS) --durations 40 --durations-min 3

histories: root tools
	FAIRLEAD_HISTORIES=200 FAIRLEAD_CHANGES=3000 FAIRLEAD_FLOWS=10000 $(VENV)/bin/pytest \
	tests/drivers/octavia/test_histories.py tests/drivers/nodeproxy/test_any_history.py \
	tests/net/test_ovsdb_cluster.py \
	tests/drivers/ovn/test_histories.py tests/e2e/test_many_flows.py tests/e2e/test_random_changes.py

mutations: root base
	$(VENV)/bin/python -m tests.mutations

manifests: tools
	sh deploy/render.sh deploy/manifests

bench: root tools
	@$(STEP) occm sh tools/build.sh occm || \
		echo "setup: no cloud-provider-openstack to compare with: see above" >&2
	@$(STEP) metallb sh tools/build.sh metallb || \
		echo "setup: no MetalLB to compare with: see above" >&2
	$(VENV)/bin/python -m bench.packets --plots docs/performance
	$(VENV)/bin/python -m bench.lab --plots docs/performance
	$(VENV)/bin/python -m bench.proxy --plots docs/performance
	$(VENV)/bin/python -m bench.live --plots docs/performance
	$(VENV)/bin/python -m bench.scale
	$(VENV)/bin/python -m bench.nodes
	$(VENV)/bin/python -m bench.health_flood
	$(VENV)/bin/python -m bench.octavia --services 10
	$(VENV)/bin/python -m bench.ovsdb
	$(VENV)/bin/python -m bench.ovn
	$(VENV)/bin/python -m bench.announce --rounds 1 --systems direct announce metallb \
		--parts idle created shares rates events changes

lock: base
	$(COMPILE) pyproject.toml --extra octavia --group dev -o requirements.lock
	$(COMPILE) bench/requirements.in -o bench/requirements.lock
	$(COMPILE) tests/openstack/requirements.in -o tests/openstack/requirements.lock

clean:
	rm -rf build .venv src/fairlead/objects
