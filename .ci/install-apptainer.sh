#!/bin/bash
# Install Apptainer (rootless build, from Debian sid) on a Debian 12 machine, as root, idempotently,
# without touching the system's libc.
#
#   install-apptainer.sh [--user NAME] [--private-libc] [--remove]
#
# How: Debian 12 has no apptainer; sid has one that wants libc6 >= 2.38 only because it was compiled
# against C23 headers: three references to __isoc23_strtol/__isoc23_strtoul@GLIBC_2.38. The .deb is
# unpacked, those references are renamed to strtol/strtoul@GLIBC_2.2.5 in the ELF tables, the Depends line
# is set to the libc that is here, and the .deb is rebuilt and installed with apt (so that its real
# dependencies come from bookworm, and `apt-get purge apptainer` removes it).
# If sid's apptainer ever needs another new symbol, the second way is taken by itself (or with
# --private-libc): sid's libc6, libseccomp2 and libsqlite3-0 go to /opt/apptainer-libc and the two
# programs get that loader and a DT_RPATH (patchelf).
#
# Environment: APPTAINER_DEB=path of a kept sid .deb (then sid is not asked; sid keeps only its newest),
#              APPTAINER_SUITE=sid, DEBIAN_MIRROR=the mirror's URL (default: the one that apt is set up with here)
set -euo pipefail
SUITE=${APPTAINER_SUITE:-sid}
MIRROR=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep '/debian$' | head -n 1)}
PRIV=/opt/apptainer-libc
CONF=/etc/apptainer/apptainer.conf
USER_NAME= MODE=symbols REMOVE=
while [ $# -gt 0 ]; do case "$1" in
  --user) USER_NAME=$2; shift 2;;
  --private-libc) MODE=private; shift;;
  --remove) REMOVE=1; shift;;
  *) echo "usage: $0 [--user NAME] [--private-libc] [--remove]" >&2; exit 2;;
esac; done
[ "$(id -u)" = 0 ] || { echo "run as root" >&2; exit 1; }
[ "$(dpkg --print-architecture)" = amd64 ] || { echo "only amd64 was tried" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
say(){ echo "install-apptainer: $*"; }

if [ "$REMOVE" ]; then
  apt-get -o DPkg::Lock::Timeout=300 purge -y -q apptainer >/dev/null 2>&1 || true
  rm -rf "$PRIV" /etc/apptainer; say removed; exit 0
fi

# 1. what it uses from bookworm: squashfuse mounts SIFs without root, fuse-overlayfs and fuse2fs are its
#    second choices for overlays, newuidmap (uidmap) is for --fakeroot
want="squashfs-tools squashfuse fuse3 fuse-overlayfs fuse2fs uidmap containernetworking-plugins ca-certificates tini"
miss=; for p in $want; do dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || miss="$miss $p"; done
if [ "$miss" ]; then
  say "apt-get install$miss"
  apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends $miss >/dev/null 2>&1 ||
    { apt-get update -q >/dev/null; apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends $miss >/dev/null; }
fi

# 2. the program
if ! apptainer --version >/dev/null 2>&1; then
  T=$(mktemp -d); trap 'rm -rf "$T"' EXIT; chmod 755 "$T"
  apt_sid(){ # an apt of its own, which never touches the system's lists
    mkdir -p "$T/lists/partial" "$T/cache/archives/partial"
    [ -f "$T/src" ] || echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR $SUITE main" >"$T/src"
    apt-get -q -oDir::Etc::sourcelist="$T/src" -oDir::Etc::sourceparts=/dev/null -oDir::State::Lists="$T/lists" \
      -oDir::Cache="$T/cache" -oAcquire::Languages=none -oAPT::Sandbox::User=root "$@"
  }
  fetch(){ [ -f "$T/updated" ] || { say "reading the index of $SUITE"; apt_sid update >/dev/null; touch "$T/updated"; }
           (cd "$T" && apt_sid download "$@" >/dev/null); }
  if [ "${APPTAINER_DEB:-}" ] && [ -f "${APPTAINER_DEB}" ]; then cp "$APPTAINER_DEB" "$T/apptainer.deb"
  else fetch apptainer; mv "$T"/apptainer_*.deb "$T/apptainer.deb"; fi
  dpkg-deb -R "$T/apptainer.deb" "$T/d"
  ver=$(dpkg-deb -f "$T/apptainer.deb" Version)
  libdir=$T/d/usr/lib/x86_64-linux-gnu/apptainer
  elfs="$T/d/usr/bin/apptainer $libdir/bin/starter $libdir/lib/offsetpreload.so"
  have=$(dpkg-query -W -f '${Version}' libc6 | sed 's/-.*//')
  cat >"$T/elf.py" <<'PY'
import struct, sys
floor = tuple(int(x) for x in sys.argv[1].split('.'))
def patch(path):
    d = bytearray(open(path, 'rb').read())
    assert d[:6] == b'\x7fELF\x02\x01', path + ': not a little-endian ELF64'
    shoff, = struct.unpack_from('<Q', d, 0x28)
    esz, num, _ = struct.unpack_from('<HHH', d, 0x3A)
    # section: name,type,flags,addr,offset,size,link,info,align,entsize
    secs = [struct.unpack_from('<IIQQQQIIQQ', d, shoff + i * esz) for i in range(num)]
    dynsym = next(s for s in secs if s[1] == 11)
    versym = next(s for s in secs if s[1] == 0x6FFFFFFF)
    verneed = next(s for s in secs if s[1] == 0x6FFFFFFE)
    cstr = lambda sec, off: d[secs[sec][4] + off:d.index(0, secs[sec][4] + off)].decode()
    idx, o = {}, verneed[4]                       # version index -> (file, version, offset of its record)
    while True:
        _, cnt, vfile, aux, nxt = struct.unpack_from('<HHIII', d, o)
        a = o + aux
        for _ in range(cnt):
            _, _, other, name, anext = struct.unpack_from('<IHHII', d, a)
            idx[other] = (cstr(verneed[6], vfile), cstr(verneed[6], name), a)
            a += anext
        if not nxt: break
        o += nxt
    def ver(n):
        try: return tuple(int(x) for x in n.split('_')[1].split('.'))
        except ValueError: return (0,)
    new = {i: v for i, v in idx.items() if v[1].startswith('GLIBC_') and ver(v[1]) > floor}
    if not new: return []
    base = next(i for i, v in idx.items() if v[0] == 'libc.so.6' and v[1] == 'GLIBC_2.2.5')
    done = []
    for k in range(dynsym[5] // 24):
        vo, so = versym[4] + 2 * k, dynsym[4] + 24 * k
        v = struct.unpack_from('<H', d, vo)[0] & 0x7FFF
        if v not in new: continue
        st, = struct.unpack_from('<I', d, so)
        name = cstr(dynsym[6], st)
        if not (name.startswith('__isoc23_strto') or name.endswith('scanf') and name.startswith('__isoc23_')):
            sys.exit('%s: cannot do without %s@%s' % (path, name, new[v][1]))
        struct.pack_into('<I', d, so, st + len('__isoc23_'))   # the name's tail is the old function
        struct.pack_into('<H', d, vo, base)
        done.append(name)
    b = idx[base][2]
    for _, _, a in new.values():                  # nothing needs it now: name the base version instead
        d[a:a + 4], d[a + 8:a + 12] = d[b:b + 4], d[b + 8:b + 12]
    open(path, 'wb').write(d)
    return done
for p in sys.argv[2:]: print(p.rsplit('/', 1)[1], *patch(p))
PY
  if [ $MODE = symbols ] && ! python3 "$T/elf.py" "$have" $elfs; then
    say "falling back to a private libc"; MODE=private
    rm -rf "$T/d"; dpkg-deb -R "$T/apptainer.deb" "$T/d"
  fi
  if [ $MODE = private ]; then
    apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends patchelf >/dev/null 2>&1
    fetch libc6 libseccomp2 libsqlite3-0
    for f in "$T"/lib*_amd64.deb; do dpkg-deb -x "$f" "$T/l"; done
    mkdir -p "$PRIV"; L=$T/l/usr/lib/x86_64-linux-gnu
    cp -a "$L"/{ld-linux-x86-64.so.2,libc.so.6,libm.so.6,libresolv.so.2,libpthread.so.0,libdl.so.2} "$L"/libseccomp.so.* "$L"/libsqlite3.so.* "$PRIV"/
    patchelf --force-rpath --set-rpath "$PRIV" $(readlink -f "$PRIV"/libseccomp.so.2 "$PRIV"/libsqlite3.so.0)
    patchelf --set-interpreter "$PRIV/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$PRIV" "$T/d/usr/bin/apptainer" "$libdir/bin/starter"
    # (offsetpreload.so is loaded into bookworm's fuse2fs, so it keeps its need of 2.38: overlays inside a SIF fail in this mode)
  fi
  sed -i -E "/^Depends:/s/libc6 \(>= [0-9.]+\)/libc6 (>= $have)/; s/^Version: .*/&+local1/" "$T/d/DEBIAN/control"
  (cd "$T/d" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
  dpkg-deb --root-owner-group -Znone -b "$T/d" "$T/apptainer-local.deb" >/dev/null
  apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends --allow-downgrades -o Dpkg::Options::=--force-confold "$T/apptainer-local.deb" >"$T/log" 2>&1 ||
    { cat "$T/log" >&2; exit 1; }
  say "installed apptainer $ver (way: $MODE)"
fi

# 3. its settings
set_conf(){ grep -q "^$1 = $2\$" "$CONF" || sed -i "s|^#\? *$1 =.*|$1 = $2|" "$CONF"; }
[ -d /run/systemd/system ] || set_conf 'systemd cgroups' no
# Root in a container often lacks a capability (CAP_SYS_RESOURCE), and the default 'full' then fails with
# 'Requesting capability set 0x1ffffffffff while permitted capability set is ...'
last=$(cat /proc/sys/kernel/cap_last_cap); all=$(( (1 << (last + 1)) - 1 ))
perm=$(( 16#$(awk '/^CapPrm/{print $2}' /proc/self/status) ))
[ $(( perm & all )) = $all ] || set_conf 'root default capabilities' no

# 4. what changes with every boot: the FUSE device (often 0600 root)
[ -e /dev/fuse ] || mknod /dev/fuse c 10 229 || true
[ ! -e /dev/fuse ] || chmod 0666 /dev/fuse

# 5. ids for --fakeroot: for root (so that `apptainer build --fakeroot` works as root), and for a plain user
touch /etc/subuid /etc/subgid
ids(){ local n=$1 first=$2 f; for f in /etc/subuid /etc/subgid; do grep -q "^$n:" $f || echo "$n:$first:65536" >>$f; done; }
ids root 1000000
if [ "$USER_NAME" ]; then
  id "$USER_NAME" >/dev/null 2>&1 || useradd -m -s /bin/bash "$USER_NAME"
  ids "$USER_NAME" $(( 2000000 + 65536 * $(id -u "$USER_NAME") ))
fi

# 6. proof
[ -u /usr/bin/newuidmap ] || say "warning: newuidmap is not set-uid: no --fakeroot with a range of ids"
apptainer --version
singularity --version >/dev/null
