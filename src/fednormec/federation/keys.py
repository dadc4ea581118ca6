"""Keys of a federation: a certificate authority for the server's TLS, and a key pair for every client.

A client's private key is in OpenSSH format on the curve P-384, as Flower's node authentication wants it.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fednormec.errors import UserError

CA, SERVER_KEY, SERVER_CERTIFICATE = "ca.crt", "server.key", "server.crt"
NODE_KEY, NODE_PUBLIC = "node.key", "node.pub"
VALID = datetime.timedelta(days=365)
Private: TypeAlias = ec.EllipticCurvePrivateKey
Public: TypeAlias = ec.EllipticCurvePublicKey


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Makes a certificate authority, and a certificate for a server that has any of these names or addresses.

    The authority's key is not kept: it signs once.
    """
    authority, server = _key(), _key()
    issuer = _name("fednormec federation")
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    leaf = (
        _certificate(_name(hosts[0]), issuer, server.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    write_secret(folder / SERVER_KEY, server.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, _PLAIN))
    (folder / SERVER_CERTIFICATE).write_bytes(leaf.public_bytes(form.Encoding.PEM))
    (folder / CA).write_bytes(root.public_bytes(form.Encoding.PEM))


def make_client(folder: Path) -> None:
    """Makes a key pair."""
    key = _key()
    write_secret(folder / NODE_KEY, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, _PLAIN))
    (folder / NODE_PUBLIC).write_bytes(key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH))


def private_key(path: Path) -> Private:
    """Returns the private key in a file; raises UserError if it cannot be used."""
    try:
        key = form.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} holds no private key that can be used: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} must hold an elliptic curve key: ssh-keygen -t ecdsa -b 384 makes one.")
    return key


def public_key(path: Path) -> Public:
    """Returns the public key in a file; raises UserError if it cannot be used."""
    try:
        key = form.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} holds no public key that can be used: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} must hold an elliptic curve key: ssh-keygen -t ecdsa -b 384 makes one.")
    return key


def write_secret(path: Path, content: bytes) -> None:
    """Writes a new file that nobody else may read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(content)


_PLAIN = form.NoEncryption()


def _key() -> Private:
    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate(subject: x509.Name, issuer: x509.Name, key: Public) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
