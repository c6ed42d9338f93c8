# "make check" runs most of what CI runs. The other targets take longer: lab/README.md.
#
# HASP_TEST_REDIS=container|process|inprocess|redis://… says which Redis the
# tests use; unset, redis-server if it is installed, else miniredis.

.PHONY: check fmt vet staticcheck tidy tags test race modules lab compare results torture planted simulate soak fuzz mutate model kube api.txt

# Tests mostly wait, so several targets run at once, but compare and torture measure.
check: fmt vet staticcheck tidy tags
	$(MAKE) -j2 test race
	$(MAKE) -j3 lab $(MODULES)
	$(MAKE) compare torture

fmt:
	@out=$$(gofmt -s -l .); [ -z "$$out" ] || { echo "gofmt -s -w these:"; echo "$$out"; exit 1; }

# The packages that differ by system are also checked for systems on which the tests do not run.
vet:
	go vet ./...
	for s in windows/386 darwin/arm64; do \
		GOOS=$${s%/*} GOARCH=$${s#*/} CGO_ENABLED=0 go vet . ./memlock ./filelock ./internal/clock || exit 1; \
	done

staticcheck:
	go tool staticcheck ./...

tidy:
	go mod tidy -diff

# A release of all modules, made in a clone that is removed.
tags:
	.ci/tag -n v$$(sed -n 's/^## \([0-9.]*\) - .*/\1/p' CHANGELOG.md | head -1)

# "make test" runs what "make race" leaves out. With the race detector, a crowd in virtual time takes
# up to a hundred times as long, so -short leaves crowds out. UNRACED run the same code as other
# packages, or nothing that could race. go vet runs before the tests, and checks more than their own
# vet would, so they have -vet=off.
CROWDS = $$(grep -rl --include='*_test.go' 'await\.Crowd\|strategytest\.Conform' . | xargs dirname | sort -u)
UNRACED = ./internal/acceptance ./internal/pages ./internal/api ./internal/await ./internal/redistest/...

# The slowest package comes first, so that it does not run alone at the end. Tests mostly wait, so
# more packages run at once than there are processors.
test:
	go test -p 4 -vet=off -shuffle=on -timeout 15m $(UNRACED) $(CROWDS)

race:
	go test -p 4 -race -short -vet=off -shuffle=on -timeout 15m ./redlock $$(go list ./... | grep -vxF "$$(go list $(UNRACED))")

# The modules that need other libraries. internal/integrations has the code of
# docs/integrations.md. Its tests of goose and of a fence in SQL are skipped if no PostgreSQL is
# installed, and so are those of pglock. internal/browser tests the page of hasp ui. It is skipped
# if no Chromium is installed. The tests of etcdlock are skipped if no etcd is installed;
# HASP_TEST_ETCD=FILE names another one. With RACE=-race they use the race detector. They mostly
# wait, so two run at once.
RACE ?=
MODULES = pglock etcdlock caslock caslock/s3kv caslock/natskv caslock/sqlkv caslock/sqlkv/sqlite caslock/k8slease gocronhasp otelhasp cmd/hasp-all internal/integrations internal/browser
modules:
	$(MAKE) -j2 $(MODULES)

# caslock beside the leader election of client-go, on one Lease. It is not part of "make check",
# because to compile and to vet all of client-go takes minutes.
.PHONY: $(MODULES) caslock/internal/election
$(MODULES) caslock/internal/election:
	cd $@ && go mod tidy -diff && go vet ./... && $$(go -C $(CURDIR) tool -n staticcheck) ./... && \
		go test $(RACE) -vet=off -parallel 8 -shuffle=on -timeout 10m ./...

# k8slease on a real API server, with the manifests of docs/kubernetes.md, and beside client-go. The
# first run builds a kube-apiserver and an etcd into KUBE, which takes long.
KUBE ?= $(HOME)/.cache/hasp-kube
kube:
	export HASP_TEST_KUBE=$$(internal/kubetest/build.sh $(KUBE)) && \
		export HASP_TEST_ETCD=$$(internal/etcdtest/build.sh $(KUBE)) && \
		[ -n "$$HASP_TEST_KUBE" ] && [ -n "$$HASP_TEST_ETCD" ] && \
		(cd caslock/k8slease && go test -count=1 -timeout 15m -run Real ./...) && \
		$(MAKE) caslock/internal/election

# The tests of the tools: the simulation finds planted bugs, and some of its seeds are clean.
lab:
	cd lab && go mod tidy -diff && go vet ./... && $$(go -C $(CURDIR) tool -n staticcheck) ./... && \
		go test -short -vet=off -shuffle=on -timeout 15m ./...

# hasp beside other libraries, everything once, within a minute.
compare:
	@command -v redis-server >/dev/null || echo "no redis-server: hasp beside other libraries is left out"
	! command -v redis-server >/dev/null || (cd lab/bench && go run . --quick --out results/quick)

# The same in ten minutes, and seven minutes of torture. It fills the tables of
# README.md and docs/performance.md, and writes docs/results. So commit first, and let the machine
# do nothing else.
results:
	mkdir -p docs/results
	cd lab/bench && go run . --fill
	cd lab && go run ./torture -parallel 2 -results ../docs/results/torture.md

# Every strategy that processes share under faults, with a new seed, which is printed.
torture:
	@command -v redis-server >/dev/null || echo "no redis-server: the strategies on Redis are left out"
	@all=filelock,sqlite,nats,s3; \
	! command -v redis-server >/dev/null || all=$$all,spinlock,pubsublock,fairlock,redlock; \
	! command -v mariadbd >/dev/null || all=$$all,mysql; \
	! command -v etcd >/dev/null || all=$$all,etcdlock; ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || all=$$all,pglock; \
	set -x; cd lab && go run ./torture -parallel 4 -time 15s -strategy $$all

# All planted bugs are found, by torture too. It takes five minutes.
planted:
	cd lab && go test -shuffle=on -timeout 20m ./... && go run ./torture -strategy redlock -nodes 4 -time 5s

# Seeds of the simulation in virtual time; "make lab" runs a few.
SEEDS ?= 20000
simulate:
	cd lab && go run ./simulate -seeds $(SEEDS)

# The faults of torture for SOAK. It fails if a client takes more and more of the machine.
SOAK ?= 10m
soak:
	cd lab && go run ./torture -parallel 5 -time $(SOAK)

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

# Plants bugs in the Go code of MUTATE, one at a time, and says which of them no test of their package
# finds. Use it before you delete a test. Bugs in Lua scripts must be planted by hand.
MUTATE ?= ./fairlock

mutate:
	go run github.com/go-gremlins/gremlins/cmd/gremlins@v0.6.0 unleash --timeout-coefficient 60 $(MUTATE)

# The protocols of redlock and fairlock as models: lab/model/README.md. It needs spin.
model:
	lab/model/run

# The exported API, checked by internal/api. Run this when it changes.
api.txt:
	go test ./internal/api -update
