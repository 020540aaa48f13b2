"""The certificate of one job: its coordinator presents it over TCP, and its agents accept no other.

It needs the `cryptography` package (the [tls] extra). A gang on a Unix socket needs neither.
"""

from __future__ import annotations

import datetime
from dataclasses import field
from importlib.util import find_spec

from kinetic._core.values import dataclass
from kinetic.errors import PreflightError

MISSING = (
    "Hosts that connect over TCP need a certificate, which the package cryptography creates. "
    "Install it: pip install cryptography"
)
# No expiry: agents accept only this certificate, and the clocks of hosts may differ.
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    key: str = field(repr=False)


def is_available() -> bool:
    """True if the cryptography package is installed."""
    return find_spec("cryptography") is not None


def make(name: str) -> Certificate:
    """Create a key and a certificate for a DNS name.

    Raises:
        PreflightError: the cryptography package is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise PreflightError(MISSING) from error
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(pem).decode(), private.decode())
