"""Terms of one attempt at one sum: what all parties know beforehand, and the numbers that follow from it."""

from collections.abc import Mapping
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec

from fednormec.errors import UserError
from fednormec.secagg.ciphers import digest, fingerprint, number
from fednormec.secagg.graph import Neighbourhood, neighbourhood, signatures_needed

MOST_MEMBERS, MOST_WORDS, MOST_ROUNDS = 10**5, 2**28, 2**63


class Terms(NamedTuple):
    """Terms of one attempt at one sum. They are public and the same for all parties.

    Every new attempt needs an `attempt` of its own, and every member makes one `Member` for it.

    Attributes:
        run: name of the training.
        agreed: digest of its settings.
        round: number of the round.
        attempt: number of the attempt within the round.
        roster: number and public key (ECDSA, P-256) of each member of the cohort.
        floor: least number of members in the sum.
        colluders: number of members who may work with the server.
        width: number of words of 32 bits in each vector.
        neighbours: number of neighbours on the ring, even; 0 takes what `neighbourhood` finds. Secrecy does not depend
            on it, only the number of drop-outs that an attempt survives.
    """

    run: str
    agreed: str
    round: int
    attempt: int
    roster: Mapping[int, ec.EllipticCurvePublicKey]
    floor: int
    colluders: int
    width: int
    neighbours: int = 0

    @property
    def cohort(self) -> tuple[int, ...]:
        """Numbers of the members, ascending."""
        return tuple(sorted(self.roster))

    @property
    def threshold(self) -> int:
        """Number of members without whom nothing is unmasked, t in the papers."""
        return signatures_needed(len(self.roster), self.floor, self.colluders)

    @property
    def neighbourhood(self) -> Neighbourhood:
        """Number of neighbours and of shares that recover a secret."""
        return neighbourhood(len(self.roster), self.floor, self.colluders, self.neighbours)

    @property
    def context(self) -> bytes:
        """Digest of all terms, and of nothing else: what is said under one context counts under no other."""
        figures = (self.round, self.attempt, self.floor, self.colluders, self.width, *self.neighbourhood[:2])
        people = (part for one in self.cohort for part in (number(one), fingerprint(self.roster[one])))
        names = (name.encode("utf-8", "surrogatepass") for name in (self.run, self.agreed))
        return digest("terms", *names, *map(number, figures), *people)

    def checked(self) -> "Terms":
        """Returns the terms; raises UserError if no sum can be made under them, or none that keeps the promise."""
        _check_roster(self.roster)
        n = len(self.roster)
        if not 2 <= self.floor <= n:
            raise UserError(f"floor must lie between 2 and the {n} members of the cohort, not {self.floor}.")
        if not 0 <= self.colluders < self.floor:
            raise UserError(
                f"colluders must lie between 0 and {self.floor - 1}, below the floor, not {self.colluders}: "
                "one member of each sum must be honest. Raise the floor, or allow fewer colluders."
            )
        if not 1 <= self.width <= MOST_WORDS:
            raise UserError(f"width must lie between 1 and {MOST_WORDS:,} words, not {self.width}.")
        for name, value in (("round", self.round), ("attempt", self.attempt)):
            if not 0 <= value < MOST_ROUNDS:
                raise UserError(f"{name} must be a count below 2^63, not {value}.")
        self.neighbourhood  # noqa: B018  raises UserError if the number of neighbours is of no use
        return self


def _check_roster(roster: Mapping[int, ec.EllipticCurvePublicKey]) -> None:
    if not 2 <= len(roster) <= MOST_MEMBERS:
        raise UserError(f"a cohort must have between 2 and {MOST_MEMBERS:,} members, not {len(roster)}.")
    for member, key in roster.items():
        if not 0 <= member < 2**32:
            raise UserError(f"the number of a member must lie between 0 and 2^32 - 1, not {member}.")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise UserError(f"the key of member {member} must be an elliptic curve key on P-256.")
    if len({fingerprint(key) for key in roster.values()}) < len(roster):
        raise UserError("two members have the same key: each needs one of its own.")
