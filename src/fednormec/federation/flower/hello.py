"""Hello: how a client proves at which of Flower's nodes it answers.

A Grid shows numbers of nodes, not keys. So the server first sends each node a number that it made up, and the client
signs it, with its key, for this node, this run and what all agreed on. Whoever repeats that elsewhere proves nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fednormec.errors import visible
from fednormec.federation.flower.carrying import IDS
from fednormec.federation.keys import Private, Public
from fednormec.federation.messages import MOST_TEXT, Refused, framed, unframed
from fednormec.federation.transport import TERMS, differences

HELLO = "hello"
MOST_NONCE = 64
LONGEST = TERMS + 2**16  # bytes of an answer to a hello, at most
_ALGORITHM = ec.ECDSA(hashes.SHA256())


def hello(agreed: str, nonce: bytes) -> bytes:
    """Returns the bytes by which the server asks a node who it is."""
    return framed({"kind": HELLO, "agreed": agreed, "nonce": nonce.hex()})


def is_hello(data: bytes) -> bool:
    """Returns whether a client is asked who it is."""
    try:
        return unframed(data)[0].get("kind") == HELLO
    except Refused:
        return False


def introduced(
    name: str, key: Private, agreed: str, terms: Mapping[str, Any], asked: bytes, run: int, node: int
) -> tuple[bytes, str]:
    """Returns a client's answer to a hello, and why it does not sign; that is empty if it does.

    Args:
        name: name of the client.
        key: its private key.
        agreed: digest of what all must agree on, as the client knows it.
        terms: what that is, by name.
        asked: the hello.
        run: Flower's number of the run.
        node: Flower's number of the node.
    """
    said = unframed(asked)[0]
    try:
        nonce = bytes.fromhex(str(said.get("nonce")))
    except ValueError:
        nonce = b""
    why = ""
    if not 0 < len(nonce) <= MOST_NONCE:
        why = "its nonce is missing, or not what it should be"
    elif said.get("agreed") != agreed:
        why = "the server has other settings than the federation.toml here"
    proof = b"" if why else key.sign(_signed(agreed, nonce, run, node), _ALGORITHM)
    return framed({"client": name, "agreed": agreed, "terms": terms, "proof": proof.hex(), "why": why}), why


def recognised(
    data: bytes,
    names: Sequence[str],
    keys: Sequence[Public | None],
    agreed: str,
    terms: Mapping[str, Any],
    nonce: bytes,
    run: int,
    node: int,
) -> int:
    """Returns the number of the client that answered a hello; raises Refused if it does not prove to be one.

    Args:
        data: what came.
        names: names of the clients; the order numbers them.
        keys: their keys on the roster, None for one that was revoked.
        agreed: digest of what all must agree on.
        terms: what that is, by name.
        nonce: the number that the node was sent.
        run: Flower's number of the run.
        node: Flower's number of the node.
    """
    said, _ = unframed(data, TERMS)
    theirs, name = said.get("terms"), visible(said.get("client"), MOST_TEXT)
    if said.get("agreed") != agreed:
        why = differences(terms, theirs if isinstance(theirs, dict) else {})
        raise Refused(f"{name} has settings that differ from those here: {why}")
    if said.get("client") not in names:
        raise Refused(f"{name} is nobody on the roster")
    client = list(names).index(said["client"])
    key = keys[client]
    if key is None:
        raise Refused(f"{name} has no key on the roster: it was revoked")
    try:
        key.verify(bytes.fromhex(str(said.get("proof"))), _signed(agreed, nonce, run, node), _ALGORITHM)
    except (ValueError, InvalidSignature):
        raise Refused(f"what says that it is {name} does not prove it by the key on the roster") from None
    return client


def _signed(agreed: str, nonce: bytes, run: int, node: int) -> bytes:
    """Returns what is signed: nothing else that this key signs begins like it, the handshake of TLS least of all."""
    about = (agreed, nonce.hex(), str(run % IDS), str(node % IDS))
    return "\n".join(["fednormec: hello of a client to its server, 1", *about]).encode()
