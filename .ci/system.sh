#!/usr/bin/env bash
# What the tests need from the machine itself: a Redis server (redis-server or valkey-server >= 7 on PATH), and for
# sandboxes bubblewrap, newuidmap, busybox and Apptainer; for browser tasks Chromium; for `make test-slurm` Slurm's
# daemons and commands, and munge. Says first what it will do; does nothing where all is there already.
# Needs no systemd; starts no service. Without Redis it fails; without the rest only where CI=true.
# Environment: APPTAINER_DEB and others, see install-apptainer.sh.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin"
here=$(cd "$(dirname "$0")" && pwd)
missing=0

say() { echo "system: $*"; }
lack() { say "$*" >&2; missing=1; }

root=()
become_root() { # whether this can install at all; fills `root`
    [ "$(id -u)" = 0 ] && return 0
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && root=(sudo -n)
}
apt_install() {
    local -a apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends)
    "${root[@]}" "${apt[@]}" "$@" </dev/null ||
        { "${root[@]}" apt-get update -q && "${root[@]}" "${apt[@]}" "$@" </dev/null; }
}
can_install() { # $1: what for
    command -v apt-get >/dev/null || { lack "no $1 here, and no apt-get to install it: install $1"; return 1; }
    become_root || { lack "installing $1 needs root: run 'sudo make system', or ask for $1"; return 1; }
}

# --- Redis
major() { "$1" --version 2>/dev/null | sed -n 's/.* v=\([0-9]*\)\..*/\1/p'; }
redis_here() {
    local server version
    for server in valkey-server redis-server; do
        version=$(major "$server" || true)
        if [ "${version:-0}" -ge 7 ]; then say "$server $version is here ($(command -v "$server"))"; return 0; fi
    done
    return 1
}
install_still() { # $1: the service that would start with the packages, $2: its pid file, then the packages
    # Packages start their service at once; a policy of 101 forbids that. One that is there already is the owner's: kept.
    local service=$1 pid=$2 policy=/usr/sbin/policy-rc.d made=no before=no done=0
    shift 2
    if [ ! -e "$policy" ]; then
        made=yes
        printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee "$policy" >/dev/null
        "${root[@]}" chmod 755 "$policy"
    fi
    [ -e "$pid" ] && before=yes
    apt_install "$@" || done=$?
    [ "$made" = no ] || "${root[@]}" rm -f "$policy"
    if [ "$before" = no ] && [ -e "$pid" ]; then
        say "stopping the service $service that the installation started"
        "${root[@]}" service "$service" stop || true
    fi
    return "$done"
}
if ! redis_here; then
    can_install "redis-server >= 7" || exit 1
    say "will install the package redis-server (apt-get install), and keep its service from starting"
    install_still redis-server /run/redis/redis-server.pid redis-server || { say "redis-server could not be installed" >&2; exit 1; }
    redis_here || { say "the redis-server of this distribution is too old; the tests need 7 or newer" >&2; exit 1; }
fi

# --- bubblewrap, newuidmap, and what the tests call by name
packages=()
command -v bwrap >/dev/null || packages+=(bubblewrap)
command -v newuidmap >/dev/null || packages+=(uidmap)
command -v nsenter >/dev/null || packages+=(util-linux)
command -v busybox >/dev/null || packages+=(busybox-static) # the tests' small image is made of it
if [ "${#packages[@]}" -gt 0 ] && can_install "${packages[*]}"; then
    say "will install ${packages[*]} (apt-get install)"
    apt_install "${packages[@]}" >/dev/null || lack "${packages[*]} could not be installed"
fi
command -v bwrap >/dev/null && say "$(bwrap --version) is here"

# --- Apptainer; the FUSE device's mode goes with every boot
apptainer_ready() {
    apptainer --version >/dev/null 2>&1 && { [ ! -e /dev/fuse ] || [ "$(stat -c %a /dev/fuse)" = 666 ]; }
}
if ! apptainer_ready; then
    if ! command -v dpkg >/dev/null || [ "$(dpkg --print-architecture)" != amd64 ]; then
        lack "no Apptainer here, and .ci/install-apptainer.sh knows Debian on amd64 only: see apptainer.org"
    elif can_install apptainer; then
        say "will run .ci/install-apptainer.sh: the package of Debian sid, and /dev/fuse for all users"
        "${root[@]}" env APPTAINER_DEB="${APPTAINER_DEB:-}" bash "$here/install-apptainer.sh" ||
            lack "Apptainer could not be installed (is Debian's mirror reachable?): its tests will say so"
    fi
fi
if apptainer_ready; then say "$(apptainer --version) is here"; fi

# --- Chromium: the headless shell, or the whole browser; Playwright's driver comes with its wheel
chromium_here() {
    command -v chromium-headless-shell || command -v chromium
}
if ! chromium_here >/dev/null && can_install chromium-headless-shell; then
    say "will install chromium-headless-shell and fonts-dejavu-core, where there is no such package chromium (apt-get install)"
    apt_install chromium-headless-shell fonts-dejavu-core >/dev/null 2>&1 || apt_install chromium fonts-dejavu-core >/dev/null ||
        lack "Chromium could not be installed: the tests of the web family will say so"
fi
if chromium_here >/dev/null; then say "Chromium is here ($(chromium_here))"; fi

# --- Slurm: `make test-slurm` starts a private one of several nodes, which needs no service
slurm_here() {
    local program
    for program in slurmctld slurmd munged sbatch squeue ps; do command -v "$program" >/dev/null || return 1; done
}
if ! slurm_here && can_install "slurmctld, slurmd and munge"; then
    say "will install slurmctld, slurmd, slurm-client, munge and procps (apt-get install), and keep their services from starting"
    install_still munge /run/munge/munged.pid slurmctld slurmd slurm-client munge procps >/dev/null ||
        lack "Slurm could not be installed: the tests of the line on Slurm will say so"
fi
if slurm_here; then say "$(slurmctld -V) is here"; fi

if [ "$missing" = 1 ]; then
    [ "${CI:-}" != true ] || exit 1
    say "Redis is here, so the tests run; those of what is missing are left out"
fi
