# make setup      install the missing dependencies of developers: Debian packages, uv, the virtual
#                 environment, the eBPF objects, and the real OpenStack of the tests (into
#                 ~/.cache/fairlead, once, minutes); safe to repeat; log: build/setup.log
# make base       the part of setup that Fairlead itself needs, without OpenStack; the targets below
#                 install their dependencies themselves
# make demo       compare Fairlead with three other setups, with real packets; needs root
# make check      lint, types, and every test of `make test` without a lab or a built program;
#                 needs root, and only what `make base` installs; prints the failed parts and the
#                 skipped tests at the end
# make test       what a change must pass: lint, types, every deterministic test, and each promise of
#                 the product once, with real packets; needs root; runs as many tests in parallel as
#                 there are CPUs, with WORKERS=1 one after the other; a test with packets that fails
#                 runs once more, alone, and is printed as unstable if it then passes
# make soak       the statistical, long and random tests, with a table at the end and every run in
#                 build/soak; ONLY=name selects tests, ROUNDS=n repeats them; needs root; 40 minutes
#                 a round
# make tools      setup, and the other dependencies of the tests: kube-apiserver, kube-proxy, etcd
#                 and helm (built once from their Go modules, minutes), Debian's older etcd and
#                 BIRD, the official Python client, all into ~/.cache/fairlead; wrk, nginx, HAProxy
#                 and iperf3 from Debian; says at its start what there is to do, and how long that
#                 took the last time; what does not run any more is made again
# make clean-cache  remove ~/.cache/fairlead, with everything that `make tools` made there
# make mutations  change the product in 40 small ways, and check that the tests detect each change
# make manifests  write the schema of the chart, and render deploy/manifests from the chart
# make bench      packets, a lab with other load balancers, HAProxy, a live gateway, a large
#                 cluster, floods of health ports, Octavia; prints tables, writes plots to
#                 docs/performance; 58 minutes, 2 GB of disk
# make lock       resolve the dependencies again and write requirements.lock
.DEFAULT_GOAL := help
.PHONY: help setup base tools root demo check test soak mutations lint manifests bench lock
.PHONY: clean clean-cache expected
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

tools: $(if $(EXPECTED),,expected) setup
	@$(STEP) debian-etcd sh tools/etcd.sh || echo "setup: Debian's etcd is missing: see above" >&2
	@$(STEP) bird sh tools/bird.sh || echo "setup: BIRD is missing: see above" >&2
	@$(STEP) etcd sh tools/build.sh etcd || echo "setup: no etcd: see above" >&2
	@$(STEP) kubernetes sh tools/build.sh kubernetes || \
		echo "setup: no kube-apiserver and kube-proxy: see above" >&2
	@$(STEP) official-client sh tools/official.sh || \
		echo "setup: no official Python client: see above" >&2
	@$(STEP) helm sh tools/build.sh helm || echo "setup: no helm: see above" >&2
	@$(STEP) bench sh tools/bench.sh || \
		echo "setup: programs of the benchmarks are missing: see above" >&2

expected:
	@$(MAKE) --no-print-directory tools EXPECTED=1 STEP="sh tools/expected.sh"

check: root base
	@$(VENV)/bin/python tools/check.py -q --check -m 'not soak' -n $(WORKERS)

test: root $(if $(EXPECTED),,expected) lint tools
	@$(VENV)/bin/python tools/gate.py -n $(WORKERS) -m 'not soak' --durations 40 --durations-min 3

soak: root tools
	@$(STEP) metallb sh tools/build.sh metallb || \
		echo "setup: no MetalLB to compare with: see above" >&2
	@$(VENV)/bin/python tools/soak.py -n $(WORKERS) $(if $(ONLY),-k '$(ONLY)')

mutations: root base
	$(VENV)/bin/python -m tests.mutations

manifests: tools
	$(VENV)/bin/python tools/schema.py deploy/chart/fairlead/values.schema.json
	sh deploy/render.sh deploy/manifests

bench: root tools
	@$(STEP) occm sh tools/build.sh occm || \
		echo "setup: no cloud-provider-openstack to compare with: see above" >&2
	$(VENV)/bin/python -m bench.packets --plots docs/performance
	$(VENV)/bin/python -m bench.lab --plots docs/performance
	$(VENV)/bin/python -m bench.proxy --plots docs/performance
	$(VENV)/bin/python -m bench.live --plots docs/performance
	$(VENV)/bin/python -m bench.scale
	$(VENV)/bin/python -m bench.nodes
	$(VENV)/bin/python -m bench.health_flood
	$(VENV)/bin/python -m bench.octavia --services 10

lock: base
	$(COMPILE) pyproject.toml --extra octavia --group dev -o requirements.lock
	$(COMPILE) bench/requirements.in -o bench/requirements.lock
	$(COMPILE) tests/openstack/requirements.in -o tests/openstack/requirements.lock

clean:
	rm -rf build .venv src/fairlead/objects

clean-cache:
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/fairlead"
