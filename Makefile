# The two commands of fulmar are `make bench` and `make test`. Both check what they need first.

CARGO ?= cargo
# A bench under twenty seconds: make bench QUICK=1. Other arguments: make bench ARGS="--seconds 5"
QUICK ?=
ARGS ?=
# How many seeds `make sim` plays, and the first of them.
SEEDS ?= 1000
FIRST ?= 1
# The seed of property tests: the same each time, so that no change fails by a case that it drew. Others:
# make test PROPTEST_RNG_SEED=$RANDOM
export PROPTEST_RNG_SEED ?= 1
# How long `make soak` and `make fuzz` run.
MINUTES ?= 10

.PHONY: all bench test sim conformance compat loom miri soak fuzz check doc book dist dist-test setup setup-test clean

all: test

# Moves real data between fulmar and the Linux kernel's own TCP and prints what it cost.
bench: setup
	@test -x $(or $(CARGO_TARGET_DIR),target)/release/fulmar-lab || echo "bench: compiling fulmar and its benches" \
		"as one optimized unit, once: about 4 minutes on 2 CPUs. The bench follows." >&2
	$(CARGO) run --locked --release -p fulmar-lab -- bench stream $(if $(QUICK),--quick) $(ARGS)

# Every test: unit, model, simulation, and those against the kernel where the machine allows it.
test: setup-test
	$(CARGO) test --locked --workspace

# Two stacks on a virtual clock over a bad network, one scenario per seed.
sim: setup
	$(CARGO) run --locked --release -p fulmar-lab -- sim --first $(FIRST) --seeds $(SEEDS)

# The public packetdrill suites against fulmar (docs/conformance.md). Finds or fetches them and packetdrill.
conformance: setup
	scripts/conformance $(ARGS)

# Programs of others over compat/: their tests, and as root a run of each (docs/compat.md). Compiles 300 crates.
compat: setup
	scripts/compat $(ARGS)

# Hostile input for the parsers and for a whole stack, guided by coverage (libFuzzer).
fuzz: setup
	scripts/fuzz $(MINUTES)

# New seeds of hostile scenarios, from the clock, on all CPUs, with overflow checks and debug assertions; failing
# cases go to soak-failures/.
soak: setup
	$(CARGO) run --locked --profile soak -p fulmar-lab -- sim --soak --minutes $(MINUTES)

# What threads share without a lock, in every order of its steps (loom). In a target directory of its own,
# since all of it is compiled anew.
loom: setup
	RUSTFLAGS="--cfg fulmar_loom" $(CARGO) run --locked --target-dir $(or $(CARGO_TARGET_DIR),target)/loom \
		-p fulmar-models -- $(ARGS)

# Undefined behaviour in the unsafe code of mbuf, by Miri: smaller pools and fewer cases, since it interprets. All of it
# takes an hour and more: make miri ARGS=chain runs the tests with that in their name.
miri: setup
	@$(CARGO) +nightly miri --version >/dev/null 2>&1 || { echo "Miri is a part of Rust's nightly toolchain:" \
		"rustup toolchain install nightly --component miri,rust-src" >&2; exit 1; }
	MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-strict-provenance" PROPTEST_CASES=1 $(CARGO) +nightly miri test \
		--locked --target-dir $(or $(CARGO_TARGET_DIR),target)/miri -p fulmar-stack --lib -- $(or $(ARGS),mbuf::)

# What a reviewer's machine asks before it looks at anything else.
check: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

# The packages of the command fulmar, in dist/: .deb, .tar.gz, SBOM, checksums. Compiles two optimized units, about
# 10 minutes on 2 CPUs.
dist: setup
	scripts/dist

# Installs the packages of dist/ in a new Debian root, runs fulmar there, removes them; as root.
dist-test:
	scripts/dist-test

doc: setup
	$(CARGO) doc --locked --workspace --no-deps

# The pages as a book with a search, in target/book/html.
book:
	scripts/book

setup:
	@scripts/setup

setup-test:
	@scripts/setup test

clean:
	$(CARGO) clean
