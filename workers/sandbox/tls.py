"""The host's certificate: made at start, known by its fingerprint alone, which travels with the sandbox's reference."""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A key and a certificate (PEM). `fingerprint`: SHA-256 of the certificate's DER bytes, hex."""

    key: bytes
    certificate: bytes
    fingerprint: str

    @classmethod
    def make(cls) -> Identity:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sandbox host")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        return cls(
            key=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            certificate=made.public_bytes(serialization.Encoding.PEM),
            fingerprint=hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest(),
        )

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory() as folder:  # the ssl module reads files alone; 0700, gone at once
            path = Path(folder) / "pem"
            path.touch(mode=0o600)
            path.write_bytes(self.key + self.certificate)
            context.load_cert_chain(path)
        return context
