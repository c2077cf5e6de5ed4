# Penstock: every target does its own set-up and is cheap to run again. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)

# Compilers, headers and tools that the build and the tests need, by their Debian names.
PACKAGES := clang llvm gcc libc6-dev libelf-dev zlib1g-dev m4 pkg-config make libpcap-dev iproute2 nftables tcpdump faketime python3 dnsmasq-base

# Everything is built as the caller. What needs privilege (namespaces, XDP, AF_XDP) is run as root: by sudo, if need be.
ifneq ($(shell id -u),0)
OF_TESTS := PENSTOCK_BIN,PENSTOCK_TEST_OFFLOAD,PENSTOCK_KUBERNETES,PENSTOCK_KUBE_PROXY_MODE,PENSTOCK_IMAGES,PENSTOCK_HELM
OF_TESTS := $(OF_TESTS),PENSTOCK_COLLECTOR,PENSTOCK_FIGURES,PENSTOCK_SUITES,PENSTOCK_RESULTS,PENSTOCK_STAY,PENSTOCK_MUTATION,KUBEBUILDER_ASSETS,TREX_DIR,KEEP,PENSTOCK_PEERS
AS_ROOT := sudo --preserve-env=PATH,HOME,TERM,NO_COLOR,$(OF_TESTS)
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER := $(AS_ROOT)
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER := $(AS_ROOT)
endif

.PHONY: help
help: ## What can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Install what is missing of the compilers, headers and tools (Debian, Ubuntu)
	@./scripts/setup $(PACKAGES)

.PHONY: build
build: setup ## The penstock binary and the kubectl plugin, optimised, in target/release
	$(CARGO) build --release --locked -p penstock -p penstock-kubectl -p penstock-cni

# For another machine: the cross compiler, and the libraries to link with.
PACKAGES_ARM64 := gcc-aarch64-linux-gnu libc6-dev:arm64 linux-libc-dev:arm64 libelf-dev:arm64 zlib1g-dev:arm64

.PHONY: build-arm64
build-arm64: setup ## The same for arm64, from x86-64, in target/arm64/aarch64-unknown-linux-gnu/release
	@./scripts/setup $(PACKAGES_ARM64)
	./scripts/build-arm64 build --locked --release -p penstock -p penstock-kubectl -p penstock-cni

# What measures: the benchmarks' programs, and the daemon that they start.
.PHONY: build-bench
build-bench: setup ## The programs of the benchmarks too: demo, report, peers, smoke, soak, visits
	$(CARGO) build --release --locked -p penstock -p penstock-kubectl -p penstock-cni -p penstock-bench --bins

# The daemon and the demo as the tests build them: quick to compile, and each frame is accounted for.
.PHONY: demo
demo: setup ## A node in namespaces, real traffic, expected against observed   (KEEP=1 leaves the node up)
	$(CARGO) build --locked -p penstock -p penstock-bench --bin penstock --bin demo
	$(AS_ROOT) $(TARGET)/debug/demo

# Tests on veths wait for packets more than they compute.
export RUST_TEST_THREADS ?= $(shell echo $$(( 2 * $$(nproc) )))

.PHONY: test
test: setup ## Every test but those that take minutes, those on real veths included
	$(CARGO) test --workspace --locked --no-fail-fast
	@# The connection table's interleavings: the same code over loom's atomics.
	$(CARGO) test --locked -p penstock-dataplane --features loom --lib conntrack::interleavings

# Tests that pass as any user: no namespace, no XDP, no AF_XDP.
AS_CALLER := env -u CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER -u CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER \
	$(CARGO) test --workspace --locked --no-fail-fast
UNPRIVILEGED := packets capture captures command docs krew manifests objects policy trex

.PHONY: test-unprivileged
test-unprivileged: setup ## The tests that need neither root nor sudo: parser, pipeline, policy, replay, commands, documentation
	$(AS_CALLER) $(addprefix --test ,$(UNPRIVILEGED))
	$(AS_CALLER) --lib --exclude penstock-dataplane --exclude penstock-xdp-redirect

# Those of the packet path and of policy: they start no other program, which qemu-user would not run.
.PHONY: test-arm64
test-arm64: setup ## Of the tests without privilege, those of the packet path and of policy on arm64, from x86-64, by qemu-user
	@./scripts/setup qemu-user-static $(PACKAGES_ARM64)
	./scripts/build-arm64 test --locked -p penstock-dataplane -p penstock-policy --no-fail-fast --test packets --test policy

.PHONY: test-long
test-long: test ## Every test and those that take minutes: more interleavings, and whether the tests notice broken code of policy and of the tcx programs
	LOOM_MAX_PREEMPTIONS=3 $(CARGO) test --locked -p penstock-dataplane --features loom --lib conntrack::interleavings::concurrent_inserts_leave
	SERVICES_CASES=600 $(CARGO) test --locked --workspace --test captures -- random::
	PROPTEST_CASES=1000000 $(CARGO) test --locked --workspace --lib -- names::tests::a_mutated_answer
	ANSWERED_NAMES=10000 $(CARGO) test --locked --workspace --test veths -- system::domain_names::no_first_packet
	$(CARGO) test --locked --workspace --test veths -- --ignored --nocapture --skip faults::mends:: faults:: nodes:: on_cluster:: services::uplinks:: system::first_start:: system::differential::
	@./scripts/setup chromium
	$(CARGO) test --locked --workspace --test command -- --ignored
	$(CARGO) test --locked -p penstock-policy --test mutation -- --ignored --nocapture
	$(CARGO) test --locked -p penstock-dataplane --features replaceable-programs --test offload -- --ignored --nocapture
	$(CARGO) build --locked --workspace --features penstock-xdp-redirect/replaceable-programs --bin penstock
	$(CARGO) test --locked --workspace --features penstock-xdp-redirect/replaceable-programs --test veths -- --ignored --nocapture faults::mends::
	$(MAKE) fuzz

.PHONY: fuzz
fuzz: setup ## Frames and capture files of random bytes, a minute each   (FUZZ_SECONDS=600: ten)
	@./scripts/setup g++
	@./scripts/fuzz

.PHONY: soak
soak: build-bench ## Mixed traffic, churn and restarts for SOAK_MINUTES=30; a plot and a verdict at the end
	$(AS_ROOT) $(TARGET)/release/soak --minutes $(or $(SOAK_MINUTES),30)

.PHONY: test-apiserver
test-apiserver: setup ## What follows an API server, against a real one: built once from Go modules, then kept
	@./scripts/setup openssl
	assets=$$(./scripts/kubernetes etcd kube-apiserver) && KUBEBUILDER_ASSETS=$$assets $(CARGO) test --locked --workspace --test veths -- --nocapture api_server:: on_cluster::

# Programs of a cluster, and of upstream's suites; their versions are in bench/kubernetes.
KUBERNETES := etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl
KUBERNETES += containerd ctr containerd-shim-runc-v2 ptp bridge loopback host-local portmap
SUITES := ginkgo e2e.test agnhost coredns regression-issue-74839 cnp-conformance.test
CLUSTER_PACKAGES := openssl runc buildah docker-registry busybox-static iptables conntrack python3 python3-pip
CLUSTER_PACKAGES += bash bind9-dnsutils netcat-openbsd curl wget

.PHONY: image
image: build ## The container image that the DaemonSet runs, from the binary in target/release   (IMAGE_ARCHIVE=FILE: also there)
	@./scripts/setup buildah busybox-static ca-certificates
	./scripts/image "" $(IMAGE_ARCHIVE)

.PHONY: image-arm64
image-arm64: build-arm64 ## The same for arm64, from x86-64
	@./scripts/setup buildah ca-certificates qemu-user-static
	MACHINE=arm64 ./scripts/image "" $(IMAGE_ARCHIVE)

# Builds what a cluster runs, then runs the tests in it. PENSTOCK_KUBE_PROXY_MODE=iptables: kube-proxy in that mode, not in nftables mode.
in_cluster = ./scripts/setup $(CLUSTER_PACKAGES) && programs=$$(./scripts/kubernetes $(1)) && images=$(abspath $(TARGET))/cluster-images && \
	./scripts/cluster-images $$images && $(2) && PENSTOCK_KUBERNETES=$$programs PENSTOCK_IMAGES=$$images
IN_CLUSTER = $(call in_cluster,$(KUBERNETES) $(SUITES),./scripts/suite-images $$programs $$images/suites)

.PHONY: test-cluster
test-cluster: build ## Penstock in a real cluster of two nodes on this machine   (Kubernetes is built once, then kept)
	helm=$$(./scripts/tool helm) && collector=$$(./scripts/tool rotel) && $(IN_CLUSTER) PENSTOCK_HELM=$$helm PENSTOCK_COLLECTOR=$$collector \
		$(CARGO) test --locked --workspace --test cluster -- --include-ignored

# Their results are kept, each with what it ran on.
RESULTS := $(abspath docs/conformance)

.PHONY: test-e2e
test-e2e: build ## Kubernetes' end-to-end tests of NetworkPolicy and sig-network against Penstock's default manifests; results in docs/conformance
	$(IN_CLUSTER) PENSTOCK_SUITES=network_policy,sig_network PENSTOCK_RESULTS=$(RESULTS) \
		$(CARGO) test --locked --workspace --test cluster -- --include-ignored

.PHONY: conformance
conformance: build ## The conformance suite of ClusterNetworkPolicy against the default manifests; its report in docs/conformance
	$(IN_CLUSTER) PENSTOCK_SUITES=cluster_network_policy PENSTOCK_RESULTS=$(RESULTS) \
		$(CARGO) test --locked --workspace --test cluster -- --include-ignored

.PHONY: cluster
cluster: build ## That cluster, with Penstock in it, until Ctrl-C
	$(IN_CLUSTER) PENSTOCK_STAY=1 $(CARGO) test --locked --workspace --test cluster

.PHONY: bench-cluster
bench-cluster: build ## Round trips, throughput and new connections in that cluster, with Penstock and without
	$(call in_cluster,$(KUBERNETES),mkdir -p $$images/suites) PENSTOCK_FIGURES=1 \
		$(CARGO) test --release --locked -p penstock-bench --test cluster -- --include-ignored --nocapture

.PHONY: test-kernels
test-kernels: setup ## `penstock check`, the daemon and the demo on Debian's kernels from 6.1 on, in QEMU, one on arm64; the systemd unit over a reboot   (JOBS=2 guests at a time)
	@./scripts/setup qemu-system-x86 qemu-system-arm debootstrap cpio kmod xz-utils e2fsprogs $(PACKAGES_ARM64)
	$(CARGO) build --locked -p penstock -p penstock-bench --bin penstock --bin demo
	./scripts/build-arm64 build --locked -p penstock -p penstock-bench --bin penstock --bin demo
	./scripts/test-kernels
	./scripts/test-ipvs

.PHONY: test-collector
test-collector: setup ## Flow records into a real OpenTelemetry collector   (fetched by pip)
	PENSTOCK_COLLECTOR=$$(./scripts/tool rotel) $(CARGO) test --locked --workspace --test veths -- --ignored system::flow_records::

.PHONY: manifests-check
manifests-check: setup ## The manifests and the chart of configs/kubernetes: built by kubectl and Helm, accepted by an API server
	@./scripts/manifests-check

.PHONY: lint
lint: setup ## Format, clippy and documentation, all without warnings   (licences: make test)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked --document-private-items

# Builds the book. Debian 12 has none; it is a tool of this target alone, and part of no build.
MDBOOK_VERSION := 0.5.4
MDBOOK := $(abspath $(TARGET))/tools/bin/mdbook

.PHONY: docs
docs: setup ## The documentation as a book, in target/book, without warnings   (links and commands in it: make test)
	@[ "$$($(MDBOOK) --version 2>/dev/null)" = "mdbook v$(MDBOOK_VERSION)" ] || \
		$(CARGO) install --locked --no-default-features --root $(abspath $(TARGET))/tools --version $(MDBOOK_VERSION) mdbook
	@rm -rf $(TARGET)/book
	$(MDBOOK) build --dest-dir $(abspath $(TARGET))/book 2>&1 | tee $(TARGET)/book.log
	@! grep -E '^ *(WARN|ERROR)' $(TARGET)/book.log || { echo "docs: the warnings above must go" >&2; exit 1; }
	@echo "written: $(TARGET)/book/index.html"

.PHONY: audit
audit: ## Known vulnerabilities of the dependencies; needs cargo-deny and the advisories' host
	@./scripts/audit

# What `make bench` measures Penstock beside; a peer that is missing is left out and said to be.
PEERS := nftables iptables ipset openvswitch-switch dpdk-dev librte-net-af-xdp23 librte-mempool-ring23

.PHONY: bench
bench: build-bench ## Throughput, latency and loss beside what one would run instead; the report is target/bench/report.html
	@./scripts/setup $(PEERS) || echo "some peers could not be installed: the report says which"
	$(AS_ROOT) $(TARGET)/release/report --output $(TARGET)/bench

.PHONY: bench-long
bench-long: build-bench ## The same with more and longer repetitions
	@./scripts/setup $(PEERS) || echo "some peers could not be installed: the report says which"
	$(AS_ROOT) $(TARGET)/release/report --output $(TARGET)/bench --seconds 2 --repetitions 11 --minutes 600

.PHONY: bench-peers
bench-peers: build-bench ## Penstock beside other engines of network policy, whose programs are in PENSTOCK_PEERS=DIR   (PEERS_ARGUMENTS='--policies 10')
	@./scripts/setup openssl iptables ipset || echo "some tools of the engines could not be installed: the report says which"
	assets=$$(./scripts/kubernetes etcd kube-apiserver) && KUBEBUILDER_ASSETS=$$assets \
		$(AS_ROOT) $(TARGET)/release/peers --output $(TARGET)/bench $(PEERS_ARGUMENTS)

.PHONY: bench-smoke
bench-smoke: build-bench ## 64-byte packets per second: Penstock, raw forward, kernel, kernel with nftables
	$(AS_ROOT) $(TARGET)/release/smoke

.PHONY: bench-pipeline
bench-pipeline: setup ## Nanoseconds a packet of the pipeline and of its stages, in memory
	$(CARGO) bench --locked -p penstock-bench --bench pipeline

.PHONY: bench-check
bench-check: setup ## Instructions of the packet path's parts, counted by callgrind, against the committed baseline
	@./scripts/setup valgrind
	$(CARGO) bench --locked -p penstock-bench --bench instructions

.PHONY: bench-stages
bench-stages: setup ## Instructions and simulated cache misses of an established packet by stage, with 1 connection and with 100,000
	@./scripts/setup valgrind binutils python3
	./scripts/packet-cost

.PHONY: bench-visits
bench-visits: build-bench ## Where a new connection's time goes, part by part, and its instructions, counted in an emulated machine
	@./scripts/setup nftables qemu-system-x86 debootstrap cpio kmod xz-utils
	$(AS_ROOT) $(TARGET)/release/visits
	$(AS_ROOT) ./scripts/visit-instructions trixie --connections 300 --rounds 3

.PHONY: flamegraph
flamegraph: build-bench ## Where the worker's time goes: target/bench/flamegraph.svg   (perf and inferno; root)
	@./scripts/setup linux-perf
	command -v inferno-flamegraph >/dev/null || $(CARGO) install --locked inferno
	mkdir -p $(TARGET)/bench
	$(AS_ROOT) perf record --event cpu-clock --call-graph dwarf,8192 --freq 499 --output $(TARGET)/bench/perf.data -- \
		$(TARGET)/release/report --only pps --case "Penstock" --seconds 3 --repetitions 3 --output $(TARGET)/bench/flamegraph
	$(AS_ROOT) perf script --input $(TARGET)/bench/perf.data --comm worker-0 2>/dev/null | inferno-collapse-perf | \
		inferno-flamegraph >$(TARGET)/bench/flamegraph.svg
	@echo "written: $(TARGET)/bench/flamegraph.svg"

.PHONY: bench-policy
bench-policy: setup ## Policy lookup and compilation at scale, against what must be reached
	$(CARGO) bench --locked -p penstock-bench --bench policy

.PHONY: bench-conntrack
bench-conntrack: setup ## The connection table against the maps one could take instead, against what must be reached
	$(CARGO) bench --locked -p penstock-bench --bench conntrack

.PHONY: bench-replay
bench-replay: build ## Packets per second of replay, and nanoseconds a packet of the pipeline
	$(CARGO) bench --locked -p penstock-bench --bench replay
