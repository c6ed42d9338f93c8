# Everything CI runs is a target here; "make check" runs them all.
#
# HASP_TEST_REDIS=container|process|inprocess|redis://… says which Redis the
# tests use; unset, the best there is.

.PHONY: check fmt vet staticcheck tidy test bench compare api.txt

check: fmt vet staticcheck tidy test bench

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

# hasp beside other libraries, each scenario once, within a minute. A module of
# its own, which "make check" leaves alone.
compare:
	cd bench && go mod tidy -diff && go vet ./... && go test ./... && go run . --quick

# The exported API, checked by internal/api. Run this when it changes.
api.txt:
	go test ./internal/api -update
