# Penstock: every target does its own set-up and is cheap to run again.
#
#   make demo          the main job on an embedded node, with real packets        (KEEP=1 leaves the node up)
#   make test          every test, the ones on real veths included
#   make bench-smoke   packets per second against raw forwarding and the kernel
#   make lint          rustfmt, clippy, rustdoc, licences
#   make help          this list and the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Compilers, headers and tools that the build and the tests need, by their Debian names.
PACKAGES := clang gcc libc6-dev libelf-dev zlib1g-dev m4 pkg-config make libpcap-dev nftables

# As root: nothing. Else sudo, for the parts that need privilege only.
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env=PATH,HOME,KEEP,NO_COLOR,TERM)
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)

.PHONY: help
help: ## What can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Install what is missing of the compilers, headers and tools (Debian, Ubuntu)
	@./scripts/setup $(PACKAGES)

.PHONY: build
build: setup ## The penstock binary and the demo, optimised, in target/release
	$(CARGO) build --release --locked --bins

.PHONY: demo
demo: build ## A node in namespaces, real traffic, expected against observed
	$(AS_ROOT) $(TARGET)/release/demo

.PHONY: test
test: build ## Every test; those on real veths run the optimised daemon
	@# Built as the caller, run as root: network namespaces, XDP and AF_XDP need it.
	PENSTOCK_BIN=$(abspath $(TARGET))/release/penstock \
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='$(if $(AS_ROOT),$(AS_ROOT)$(shell printf ,)PENSTOCK_BIN)' \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='$(if $(AS_ROOT),$(AS_ROOT)$(shell printf ,)PENSTOCK_BIN)' \
	$(CARGO) test --workspace --locked

.PHONY: bench-smoke
bench-smoke: build ## 64-byte packets per second: Penstock, raw forward, kernel, kernel with nftables
	$(AS_ROOT) $(TARGET)/release/smoke

.PHONY: lint
lint: setup ## Format, clippy and documentation, all without warnings (licences: make test)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked --document-private-items
