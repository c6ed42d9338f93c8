#!/usr/bin/env bash
# Compares one goroutine's Lock and Unlock in this tree with an older commit:
#
#	bench/versus.sh COMMIT [ROUNDS]
#
# Runs of both take turns. Each run compares with the bare commands on go-redis, so the
# ratios, such as "url/bare", are those to read.
set -euo pipefail
cd "$(dirname "$0")/.."
old=$1 rounds=${2:-10}
dir=$(mktemp -d)
trap 'git worktree remove --force "$dir/old"; rm -rf "$dir"' EXIT
git worktree add -q --detach "$dir/old" "$old"

strategies="spinlock pubsublock fairlock"
for s in $strategies; do
	(cd "$dir/old" && go test -c -o "$dir/old.$s" "./$s")
	go test -c -o "$dir/new.$s" "./$s"
done

for _ in $(seq "$rounds"); do
	for s in $strategies; do
		for version in old new; do
			(cd "$s" && HASP_TEST_REDIS=process "$dir/$version.$s" -test.run '^$' -test.bench 'Uncontended$' -test.benchtime 2s >>"$dir/$version.txt")
		done
	done
done
go run golang.org/x/perf/cmd/benchstat@latest "$dir/old.txt" "$dir/new.txt"
