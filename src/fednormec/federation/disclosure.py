"""Disclosures in a federation's statement: what the network adds to who sees what."""

from fednormec.privacy.mechanism import Mechanism, Plan
from fednormec.privacy.statement import TRUST, state

DROP_OUTS = {
    "central": "a client that does not answer in time is not in the sum; the noise is, whatever arrives, and ε counts "
    "the client as drawn all the same. Taken to be so: whether a client answers depends on no other client's data but "
    "by way of what was released, and who answered stays with the server",
    "local": "a message that does not come is not seen, and ε counts it all the same. Taken to be so: whether and when "
    "a client answers does not depend on its data",
}
NETWORK = {
    "central": "whoever watches the network sees who is asked and who sends; ε counts on that staying secret, unless "
    "everyone takes part",
    "local": "when a client answers, and how long it takes",
}
SECURE = "Flower over TLS; every client proves by its key who it is, and runs its own copy of this program"
INSECURE = "Flower without TLS, on one machine"


def besides(mechanism: Mechanism, insecure: bool) -> tuple[tuple[str, str], ...]:
    """Returns what a federation's statement says besides, by name."""
    return (
        ("transport", INSECURE if insecure else SECURE),
        ("drop-outs", DROP_OUTS[mechanism.trust]),
        ("not covered", NETWORK[mechanism.trust]),
    )


def promise(plan: Plan | None) -> str:
    """Returns what a client is told before it takes part: what all rounds together cost it, and whom it trusts."""
    if plan is None:
        return "this federation promises nothing: the server sees exact messages"
    return (
        f"this federation promises, after {plan.rounds} rounds, {state(plan, plan.rounds).headline}. Trust: "
        + (TRUST[plan.mechanism.trust])
    )
