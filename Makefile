# The contract between people, CI and machines. `make` alone lists the targets.
# Everything that is fetched or built lands in .cache/ and target/, which git ignores.

PYTHON := .cache/venv/bin/python
ABSENT = @printf '%s\n' "make $@: absent: $(1)" >&2; exit 1

.PHONY: help setup build demo test verify fix bench sim crash-sweep cluster-test rdma-test fuzz soak

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: ## what demo and test need beside Rust (they call it themselves)
	@ops/setup

build: ## the ballast binary, optimised: target/release/ballast
	@ops/setup packages
	cargo build --release --locked -p ballast

demo: ## the main job on a real model, with separate processes and kill -9 (MODEL=path for your own)
	@ops/setup
	cargo build --release --locked -p ballast
	$(PYTHON) ops/demo.py $(if $(MODEL),--model "$(MODEL)")

test: ## everything: the crates' own tests, then the whole system through NATS and the command line
	@ops/test

verify: ## format, lints, licences and sources of the dependencies: only reads
	@ops/verify

fix: ## formats, and applies what clippy can mend by itself
	cargo fmt --all
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged

bench: ## the engine's speed, each figure beside a limit or a rival (ONLY=fold, lone, many, operations, restore, scale, reshard or delta)
	@ops/setup
	cargo build --release --locked -p ballast-tests --bin bench
	target/release/bench $$(ops/setup bench) $(if $(ONLY),--only "$(ONLY)")

sim: ## seeded simulation of whole clusters under faults (SEEDS=how many, SEED=one alone with every line)
	cargo run --profile sim --locked -p ballast-tests --no-default-features --bin sim -- $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED))

crash-sweep: ## kill -9 before and after every step of every machine (ONLY=regular expression)
	@ops/setup
	cargo build --locked -p ballast
	$(PYTHON) ops/crash_sweep.py $(if $(ONLY),--only "$(ONLY)")

cluster-test: ## three NATS servers with one killed, paused or cut off, two lost, and a full log (ONLY=pytest's -k)
	@ops/setup
	cargo build --locked -p ballast
	$(PYTHON) -m pytest tests/e2e -m cluster $(if $(ONLY),-k "$(ONLY)")

rdma-test: ## the RDMA transport on real verbs: Soft-RoCE in one and between two small virtual machines (Debian, x86_64, as root)
	@ops/rdma/test

fuzz: ## every decoder, and the fold, fed with damaged and arbitrary input (SECONDS=how long, INPUT=a file to feed again)
	cargo run --profile sim --locked -p ballast-tests --no-default-features --features fuzz --bin fuzz -- $(if $(SECONDS),--seconds $(SECONDS)) $(if $(INPUT),--input $(INPUT))

soak: ## (absent yet) hours of mixed work with restarts
	$(call ABSENT,the long run is not built yet)
