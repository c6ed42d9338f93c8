# "make check" runs what CI runs. The other targets take longer.
#
# HASP_TEST_REDIS=container|process|inprocess|redis://… says which Redis the
# tests use; unset, redis-server if it is installed, else miniredis.

.PHONY: check fmt vet staticcheck tidy test bench compare torture torture-more hosts hosts-short wide simulate soak fuzz mutate model modules api.txt

check: fmt vet staticcheck tidy test modules bench torture compare

fmt:
	@out=$$(gofmt -s -l .); [ -z "$$out" ] || { echo "gofmt -s -w these:"; echo "$$out"; exit 1; }

# With -race, as the tests, so that both use the same compiled packages.
vet:
	go vet -race ./...

staticcheck:
	GOFLAGS=-race $$(go tool -n staticcheck) ./...

tidy:
	go mod tidy -diff

# The slowest packages first, so that none of them runs alone at the end.
test:
	go test -race -shuffle=on -timeout 15m ./redlock ./internal/acceptance ./internal/torture/rig ./...

# The modules that need other libraries. internal/integrations has the code of
# docs/integrations.md. Its tests of goose and of a fence in SQL are skipped if no PostgreSQL is
# installed, and so are those of pglock. internal/browser tests the page of hasp ui. It is skipped
# if no Chromium is installed. The tests of etcdlock are skipped if no etcd is installed;
# HASP_TEST_ETCD=FILE names another one.
modules:
	@for dir in gocronhasp otelhasp pglock etcdlock all internal/integrations internal/browser; do \
		echo "$$dir"; \
		(cd $$dir && go mod tidy -diff && go vet -race ./... && \
			GOFLAGS=-race $$(go -C $(CURDIR) tool -n staticcheck) ./... && \
			go test -race -shuffle=on -timeout 5m -bench . -benchtime 1x ./...) || exit 1; \
	done

# Each benchmark once, so that none rots; "make modules" runs those of other modules.
# Figures: "go test -run '^$$' -bench . PACKAGE".
bench:
	go test -race -short -run '^$$' -bench . -benchtime 1x \
		$$(git grep -l '^func Benchmark' -- '*_test.go' ':!bench' ':!otelhasp' ':!pglock' ':!etcdlock' | xargs -n 1 dirname | sort -u | sed 's|^|./|')

# hasp beside other libraries. The first run builds an etcd, which takes minutes; later
# runs take less than one. bench is a module of its own.
compare:
	cd bench && go mod tidy -diff && go vet ./... && $$(go -C .. tool -n staticcheck) ./... && go test ./...
	@command -v redis-server >/dev/null || echo "no redis-server: hasp beside other libraries is left out"
	! command -v redis-server >/dev/null || (cd bench && go run . --quick --out results/quick)

# Every strategy but memlock under faults, twice: with seed 1 and with a new seed, which
# is printed.
torture:
	@command -v redis-server >/dev/null || echo "no redis-server: only files are tortured"
	@all=$$(command -v redis-server >/dev/null || echo "-strategy filelock"); set -x; \
	go run ./internal/torture -clocks=false -parallel 3 -time 15s -seed 1 $$all && \
	go run ./internal/torture -clocks=false -parallel 3 -time 15s $$all

# pglock and etcdlock under faults.
torture-more:
	cd all && go run ./torture -clocks=false -parallel 2 -time 60s -seed 1 -strategy pglock,etcdlock

# The strategies on Redis, pglock and etcdlock, with each process on a host of its own. The hosts
# are network namespaces, so this needs root.
hosts:
	HASP_TEST_HOSTS=1 go test -race ./internal/torture/...
	go run ./internal/torture -on hosts -parallel 4 -time 30s
	cd all && HASP_TEST_HOSTS=1 go test -race ./torture
	cd all && go run ./torture -on hosts -parallel 2 -time 60s -strategy pglock,etcdlock

# 30 s of hosts. Where hosts cannot be made, it says so and does nothing else.
hosts-short:
	go run ./internal/torture -on hosts -optional -parallel 4 -time 30s

# Locks whose servers and clients are far apart: docs/performance.md. It needs root.
wide:
	go run ./internal/torture/wide

# Seeds of the simulation in virtual time; "go test" runs a few.
SEEDS ?= 20000
simulate:
	go run ./internal/simulate -seeds $(SEEDS)

# The faults of torture for SOAK. It fails if a client takes more and more of the machine.
SOAK ?= 10m
soak:
	go run ./internal/torture -parallel 5 -time $(SOAK) -results soak.jsonl

# Each fuzz test for FUZZTIME, one after another; "go test" runs their seeds
# only. What one finds is left in testdata/fuzz of its package.
FUZZTIME ?= 30s

fuzz:
	@for dir in $$(git grep -l '^func Fuzz' -- '*_test.go' | xargs -n 1 dirname | sort -u); do \
		for name in $$(go test -list '^Fuzz' ./$$dir | grep '^Fuzz'); do \
			echo "$$dir $$name"; \
			go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) ./$$dir || exit 1; \
		done; \
	done

# Plants bugs one at a time, and checks that the tests find them. It takes an hour or two:
# start it weekly, by hand. Each week has a seed of its own.
SEED ?= $(shell date +%G%V)

mutate:
	go run ./internal/mutate -seed $(SEED)

# The protocols of redlock and fairlock as models: docs/model/README.md. It needs spin.
model:
	docs/model/run

# The exported API, checked by internal/api. Run this when it changes.
api.txt:
	go test ./internal/api -update
