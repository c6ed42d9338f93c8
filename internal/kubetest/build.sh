#!/usr/bin/env bash
# Builds a kube-apiserver of a version into a directory, unless it is there, and prints its path.
#
#     HASP_TEST_KUBE=$(internal/kubetest/build.sh DIR [VERSION])
#
# k8s.io/kubernetes names its staging modules with the version v0.0.0 and replaces them by folders.
# A module that depends on it has to replace them by their releases, v0.37.2 for 1.37.2.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd) version=${2:-1.37.2}
if [ ! -x "$dir/kube-apiserver-$version" ]; then
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	cd "$tmp"
	go mod init build
	mod=$(go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
	for m in $(sed -n 's/^\t\(k8s.io\/[a-z0-9-]*\) v0\.0\.0\( .*\)\{0,1\}$/\1/p' "$mod" | sort -u); do
		go mod edit -replace "$m=$m@v0.${version#1.}"
	done
	go mod edit -require "k8s.io/kubernetes@v$version"
	CGO_ENABLED=0 go build -mod=mod -trimpath -ldflags '-s -w' \
		-o "$dir/kube-apiserver-$version" k8s.io/kubernetes/cmd/kube-apiserver
fi >&2
echo "$dir/kube-apiserver-$version"
