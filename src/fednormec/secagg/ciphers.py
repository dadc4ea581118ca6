"""Signatures, key agreement, boxes and key streams, each bound to what it is for.

Whatever is hashed or signed is a label and its parts, each behind its length, so that no two lists give the same bytes.
"""

import hashlib
from typing import TypeAlias

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

PROTOCOL = b"fednormec secure aggregation 1"
KEY, SIGNATURE, TAG = 32, 64, 16  # bytes
ONCE = bytes(12)  # the nonce of a box: its key is used for this one box
Words: TypeAlias = NDArray[np.uint32]


def number(value: int) -> bytes:
    """Returns a count as eight bytes."""
    return value.to_bytes(8, "big")


def joined(label: str, *parts: bytes) -> bytes:
    """Returns the label and the parts, each behind its length."""
    return b"".join(number(len(part)) + part for part in (PROTOCOL, label.encode(), *parts))


def digest(label: str, *parts: bytes) -> bytes:
    """Returns the SHA-256 digest of a label and its parts."""
    return hashlib.sha256(joined(label, *parts)).digest()


def fingerprint(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns the digest by which a public key is known."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def signature(key: ec.EllipticCurvePrivateKey, label: str, *parts: bytes) -> bytes:
    """Returns the signature of a label and its parts: r and s, 32 bytes each."""
    r, s = decode_dss_signature(key.sign(joined(label, *parts), _signing()))
    return r.to_bytes(SIGNATURE // 2, "big") + s.to_bytes(SIGNATURE // 2, "big")


def is_signed(key: ec.EllipticCurvePublicKey, signed: bytes, label: str, *parts: bytes) -> bool:
    """Returns whether this is a signature of the label and its parts."""
    if len(signed) != SIGNATURE:
        return False
    r, s = (int.from_bytes(half, "big") for half in (signed[: SIGNATURE // 2], signed[SIGNATURE // 2 :]))
    try:
        key.verify(encode_dss_signature(r, s), joined(label, *parts), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signing() -> ec.ECDSA:
    """Returns how to sign: deterministically (RFC 6979), where the libraries here can."""
    try:
        return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
    except (TypeError, UnsupportedAlgorithm):  # cryptography before 43, OpenSSL before 3.2
        return ec.ECDSA(hashes.SHA256())


def public_of(private: bytes) -> bytes:
    """Returns the X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def common_secret(private: bytes, public: bytes) -> bytes:
    """Returns what X25519 makes of two keys; raises ValueError if the public one is of low order."""
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def is_of_use(public: bytes) -> bool:
    """Returns whether an X25519 public key is not of low order: with one of those a secret would be known to all."""
    try:
        return bool(common_secret(b"\1" * KEY, public))
    except ValueError:
        return False


def derived(secret: bytes, label: str, *parts: bytes) -> bytes:
    """Returns the key that HKDF makes of a secret for this label and these parts."""
    return HKDF(hashes.SHA256(), KEY, None, joined(label, *parts)).derive(secret)


def sealed(key: bytes, content: bytes, label: str, *parts: bytes) -> bytes:
    """Returns a box (AES-256-GCM) with this content, bound to a label and parts. Use a key for one box alone."""
    return AESGCM(key).encrypt(ONCE, content, joined(label, *parts))


def opened(key: bytes, box: bytes, label: str, *parts: bytes) -> bytes | None:
    """Returns the content of a box, None if it is not what was sealed with this key, label and parts."""
    try:
        return AESGCM(key).decrypt(ONCE, box, joined(label, *parts))
    except InvalidTag:
        return None


def keystream(key: bytes, width: int) -> Words:
    """Returns the first words of AES-256 in counter mode from zero. Use a key for one stream alone."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * width))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)
