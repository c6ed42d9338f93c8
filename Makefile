# Everything CI runs is a target here; "make check" runs them all.
#
# HASP_TEST_REDIS=container|process|inprocess|redis://… says which Redis the
# tests use; unset, the best there is.

.PHONY: check fmt vet staticcheck tidy test bench compare api.txt

check: fmt vet staticcheck tidy test bench compare

fmt:
	@out=$$(gofmt -s -l .); [ -z "$$out" ] || { echo "gofmt -s -w these:"; echo "$$out"; exit 1; }

vet:
	go vet ./...

staticcheck:
	go tool staticcheck ./...

tidy:
	go mod tidy -diff

test:
	go test -race -shuffle=on ./...

# Each benchmark once, so that none rots. Figures: "go test -bench . PACKAGE".
bench:
	go test -run '^$$' -bench . -benchtime 1x ./...

# hasp beside other libraries, within a minute once it is built, for which it
# takes some minutes the first time: a module of its own, with an etcd in it.
compare:
	cd bench && go mod tidy -diff && go vet ./... && $$(go -C .. tool -n staticcheck) ./... && go test ./...
	@command -v redis-server >/dev/null || echo "no redis-server: hasp beside other libraries is left out"
	! command -v redis-server >/dev/null || (cd bench && go run . --quick --out results/quick)

# The exported API, checked by internal/api. Run this when it changes.
api.txt:
	go test ./internal/api -update
