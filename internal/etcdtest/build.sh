#!/usr/bin/env bash
# Builds an etcd of a version into a directory, unless it is there, and prints its path. The tests
# with users need 3.5 or later, and Debian has 3.4.
#
#     HASP_TEST_ETCD=$(internal/etcdtest/build.sh ~/etcd [VERSION]) make modules
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd) version=${2:-3.7.3}
if [ ! -x "$dir/etcd-$version" ]; then
	# The package main of the server is built in a module of its own, because go install refuses a
	# module that replaces others.
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	cd "$tmp"
	go mod init build
	go get "go.etcd.io/etcd/server/v3@v$version"
	go build -o "$dir/etcd-$version" go.etcd.io/etcd/server/v3
fi >&2
echo "$dir/etcd-$version"
