"""Keys of a federation: an authority, and certificates that it signs for the server and for every client.

A client is known by its key. Its certificate can be renewed without it, and its key can be made at home: then only a
signing request leaves it.
"""

import datetime
import hashlib
import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fednormec.errors import UserError

CA, CA_KEY = "ca.crt", "authority.key"
SERVER_KEY, SERVER_CERTIFICATE = "server.key", "server.crt"
CLIENT_KEY, CLIENT_CERTIFICATE, CLIENT_REQUEST = "client.key", "client.crt", "client.csr"
YEARS, VALID = datetime.timedelta(days=3650), datetime.timedelta(days=365)  # of the authority, and of what it signs
SOON = datetime.timedelta(days=30)
LEEWAY = datetime.timedelta(days=1)  # by which a clock may be behind
Private: TypeAlias = ec.EllipticCurvePrivateKey
Public: TypeAlias = ec.EllipticCurvePublicKey
_PLAIN = form.NoEncryption()
_PEM = form.Encoding.PEM


def make_authority(folder: Path) -> None:
    """Makes the authority that vouches for the server and for every client. Its key stays in this folder."""
    key = _key()
    name = _name("fednormec federation")
    root = (
        _certificate(name, name, key.public_key(), YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_key(folder / CA_KEY, key)
    (folder / CA).write_bytes(root.public_bytes(_PEM))


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Makes the server's key, if there is none, and a certificate for these names or addresses."""
    if not (folder / SERVER_KEY).exists():
        _write_key(folder / SERVER_KEY, _key())
    public = private_key(folder / SERVER_KEY).public_key()
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    signed = _signed(folder, hosts[0], public, ExtendedKeyUsageOID.SERVER_AUTH, names)
    (folder / SERVER_CERTIFICATE).write_bytes(signed.public_bytes(_PEM))


def make_request(folder: Path, name: str) -> Path:
    """Makes a client's key, if there is none, and a request that the authority signs it; returns the request's file."""
    if not (folder / CLIENT_KEY).exists():
        _write_key(folder / CLIENT_KEY, _key())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    path = folder / CLIENT_REQUEST
    path.write_bytes(request.sign(private_key(folder / CLIENT_KEY), hashes.SHA384()).public_bytes(_PEM))
    return path


def read_request(path: Path) -> tuple[str, Public]:
    """Returns the name and the key in a signing request; raises UserError if it is none."""
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        key = request.public_key()
        (name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if not request.is_signature_valid:
            raise ValueError("its signature is wrong")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is no signing request that can be used: {error}.") from error
    return str(name.value), _elliptic(path, key)


def sign_client(folder: Path, name: str, key: Public) -> bytes:
    """Returns a certificate for a client's key, signed by the authority in this folder."""
    return _signed(folder, name, key, ExtendedKeyUsageOID.CLIENT_AUTH).public_bytes(_PEM)


def public_bytes(key: Public) -> bytes:
    """Returns a public key as it is kept on the roster."""
    return key.public_bytes(_PEM, form.PublicFormat.SubjectPublicKeyInfo)


def private_key(path: Path) -> Private:
    """Returns the private key in a file; raises UserError if it cannot be used."""
    try:
        key = form.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} holds no private key that can be used: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} must hold an elliptic curve key; fednormec federation request makes one.")
    return key


def public_key(path: Path) -> Public:
    """Returns the public key in a file; raises UserError if it cannot be used."""
    try:
        key = form.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} holds no public key that can be used: {error}.") from error
    return _elliptic(path, key)


def for_roster(key: Public) -> str:
    """Returns a public key as all agree on it in federation.toml: its point, compressed, in hexadecimal digits."""
    return key.public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint).hex()


def on_roster(name: str, text: str) -> Public:
    """Returns the public key of a client that federation.toml has; raises UserError if it is none."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(text))
    except ValueError:
        raise UserError(f"what [federation] keys has for {name}, '{text[:80]}', is no public key: take federation.toml "
                        "from the server's operator again, or sign the client again (fednormec federation sign)."
                        ) from None  # fmt: skip


def fingerprint(certificate: bytes | Public) -> bytes:
    """Returns the digest by which a client is known, of its public key or of a certificate for it in DER.

    A certificate that cannot be read has one that nobody has.
    """
    if isinstance(certificate, bytes):
        try:
            certificate = x509.load_der_x509_certificate(certificate).public_key()  # type: ignore[assignment]
            assert isinstance(certificate, ec.EllipticCurvePublicKey)
        except (ValueError, TypeError, UnsupportedAlgorithm, AssertionError):
            return b""
    return hashlib.sha256(certificate.public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)).digest()


def holder(certificate: bytes) -> str:
    """Returns the name that a certificate in DER was made for; empty if it has none."""
    try:
        found = x509.load_der_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(found[0].value) if found else ""
    except ValueError:
        return ""


class Validity(NamedTuple):
    """Time for which a certificate holds."""

    begins: datetime.datetime
    ends: datetime.datetime

    def trouble(self, whose: str, remedy: str) -> tuple[str | None, str | None]:
        """Returns what is wrong by the clock here, and what soon will be; None where all is well."""
        now = datetime.datetime.now(datetime.UTC)
        if now >= self.ends:
            return (
                f"{whose} expired on {self.ends:%Y-%m-%d}: {remedy}. The clock here says {now:%Y-%m-%d %H:%M} UTC",
                None,
            )
        if now < self.begins:
            return (
                f"{whose} holds from {self.begins:%Y-%m-%d} on, and the clock here says {now:%Y-%m-%d %H:%M} UTC",
                None,
            )
        if now >= self.ends - SOON:
            return None, f"{whose} expires on {self.ends:%Y-%m-%d}: {remedy}"
        return None, None


def validity(path: Path) -> Validity:
    """Returns for how long the certificate in a file holds; raises UserError if it is none."""
    found = _certificate_in(path)
    return Validity(found.not_valid_before_utc, found.not_valid_after_utc)


def require_signed(path: Path, authority: Path) -> None:
    """Raises UserError if the certificate in a file was signed by another authority than the one in the other file."""
    try:
        found, root = (x509.load_pem_x509_certificate(file.read_bytes()) for file in (path, authority))
        found.verify_directly_issued_by(root)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        raise UserError(
            f"{path} was not signed by the authority in {authority}: is it of another federation?"
        ) from error


def certified_hosts(path: Path) -> list[str]:
    """Returns the names and addresses that a server's certificate holds for, the first of them first."""
    try:
        names = _certificate_in(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise UserError(f"{path} names no server: {error}.") from error
    return [str(name.value) for name in names]


def for_serving(folder: Path) -> ssl.SSLContext:
    """Returns the server's side of TLS 1.3: only who shows a certificate of this federation gets through."""
    return _context(ssl.PROTOCOL_TLS_SERVER, folder, SERVER_CERTIFICATE, SERVER_KEY)


def for_joining(folder: Path) -> ssl.SSLContext:
    """Returns a client's side of TLS 1.3: it believes this federation's authority alone."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, CLIENT_CERTIFICATE, CLIENT_KEY)


def _context(side: int, folder: Path, certificate: str, key: str) -> ssl.SSLContext:
    for name in (CA, certificate, key):
        if not (folder / name).exists():
            raise UserError(f"{folder / name} is missing; fednormec federation init makes it.")
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / certificate, folder / key)
    except (ssl.SSLError, OSError) as error:
        raise UserError(f"the certificates in {folder} cannot be used: {error}.") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def write_secret(path: Path, content: bytes) -> None:
    """Writes a new file that nobody else may read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(content)


def _write_key(path: Path, key: Private) -> None:
    write_secret(path, key.private_bytes(_PEM, form.PrivateFormat.PKCS8, _PLAIN))


def _signed(
    folder: Path,
    name: str,
    key: Public,
    purpose: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None = None,
) -> x509.Certificate:
    authority = private_key(folder / CA_KEY)
    root = _certificate_in(folder / CA)
    builder = (
        _certificate(_name(name), root.subject, key, VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(authority, hashes.SHA384())


def _certificate_in(path: Path) -> x509.Certificate:
    """Returns the certificate in a file; raises UserError if it cannot be used."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} holds no certificate that can be used: {error}.") from error


def _elliptic(path: Path, key: object) -> Public:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} must hold an elliptic curve key; fednormec federation request makes one.")
    return key


def _key() -> Private:
    return ec.generate_private_key(ec.SECP256R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: Public, holds: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LEEWAY)
        .not_valid_after(now + holds)
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
