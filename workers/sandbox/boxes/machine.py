"""What of this machine a sandbox may see where it is shown its programs: the links at the root, a part of /etc."""

from __future__ import annotations

HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"

MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into /usr on a merged machine; folders of their own on another."""

FROM_ETC = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "java", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "mime.types", "os-release", "perl", "pki/ca-trust",
    "pki/tls/certs", "ssl/certs", "ssl/openssl.cnf", "terminfo",
)  # fmt: skip
"""What programs in /usr look for in /etc. The rest (accounts, keys, the site's settings) is nobody's business."""


def accounts(home: str) -> dict[str, str]:
    """Files of /etc that are ours instead of this machine's: name -> text. `home`: root's inside."""
    return {
        "passwd": f"root:x:0:0:root:{home}:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
        "hosts": HOSTS,
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    }
