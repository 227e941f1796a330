#!/usr/bin/env bash
# What the tests need from the machine itself: a Redis server (redis-server or valkey-server >= 7 on PATH).
# Says first what it will do; does nothing where it is there already. Needs no systemd; starts no service.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin"

major() { "$1" --version 2>/dev/null | sed -n 's/.* v=\([0-9]*\)\..*/\1/p'; }
for server in valkey-server redis-server; do
    version=$(major "$server" || true)
    if [ "${version:-0}" -ge 7 ]; then
        echo "system: $server $version is here ($(command -v "$server")): nothing to do"
        exit 0
    fi
done

if ! command -v apt-get >/dev/null; then
    echo "system: no redis-server >= 7 here, and no apt-get to install one: install redis-server or valkey-server" >&2
    exit 1
fi
root=()
if [ "$(id -u)" != 0 ]; then
    if ! { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; then
        echo "system: installing redis-server needs root: run 'sudo make system' (or ask for 'apt-get install redis-server')" >&2
        exit 1
    fi
    root=(sudo -n)
fi

echo "system: will install the package redis-server (apt-get install), and keep its service from starting"
# Packages start their service at once; a policy of 101 forbids that. One that is there already is the owner's: kept.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '"${root[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee "$policy" >/dev/null
    "${root[@]}" chmod 755 "$policy"
fi
running() { [ -e /run/redis/redis-server.pid ]; }
running && before=yes || before=no
install() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server; }
install </dev/null || { "${root[@]}" apt-get update -q && install </dev/null; }
if [ "$before" = no ] && running; then
    echo "system: stopping the redis service that the installation started"
    "${root[@]}" service redis-server stop || true
fi
version=$(major redis-server || true)
if [ "${version:-0}" -lt 7 ]; then
    echo "system: the redis-server of this distribution is version ${version:-unknown}; the tests need 7 or newer" >&2
    exit 1
fi
echo "system: redis-server $version is installed"
