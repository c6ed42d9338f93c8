#!/bin/sh
# Makes a Docker image of the Redis that is installed on this machine, for
# machines that reach no image registry:
#
#	sh mkimage.sh [TAG]          # hasp-redis:local
#	HASP_TEST_REDIS=container HASP_TEST_REDIS_IMAGE=hasp-redis:local go test ./internal/acceptance
#
# The image holds redis-server, redis-cli and redis-sentinel, the libraries
# they are linked with, and nothing else: no shell. It is not made again if it
# holds the same files already.
set -eu

tag=${1:-hasp-redis:local}

fail() {
	echo "mkimage.sh: $*" >&2
	exit 1
}

command -v docker >/dev/null || fail "docker is not installed"
server=$(command -v redis-server) || fail "redis-server is not installed"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/bin" "$root/data" "$root/tmp" "$root/etc"
chmod 1777 "$root/data" "$root/tmp"
echo 'redis:x:999:999:redis:/data:/bin/false' >"$root/etc/passwd"

# add copies a file to where it is found here, links followed.
add() {
	mkdir -p "$root$(dirname "$1")"
	cp -L "$1" "$root$1"
}

for name in redis-server redis-cli redis-sentinel; do
	path=$(command -v $name) || continue
	cp -L "$path" "$root/bin/$name"
	# "name => /path (address)" for a library, "/path (address)" for the loader.
	for lib in $(ldd "$path" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }'); do
		[ -e "$root$lib" ] || add "$lib"
	done
done

sum=$(cd "$root" && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16)
if [ "$(docker image inspect -f '{{.Comment}}' "$tag" 2>/dev/null)" = "files $sum" ]; then
	echo "$tag is up to date ($("$server" --version | cut -d' ' -f1-3))"
	exit 0
fi
tar -C "$root" --owner=0 --group=0 -c . | docker import \
	--change 'ENV PATH=/bin' --change 'WORKDIR /data' --change 'EXPOSE 6379' \
	--change 'CMD ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no"]' \
	--message "files $sum" - "$tag" >/dev/null
echo "made $tag ($("$server" --version | cut -d' ' -f1-3))"
