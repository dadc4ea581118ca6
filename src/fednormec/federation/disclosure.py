"""Disclosures in a federation's statement: what the network adds to who sees what."""

from fednormec.privacy.record_statement import TRUST as TRUST_OF_RECORDS
from fednormec.privacy.records import AnyPlan, for_clients, for_records
from fednormec.privacy.statement import state, trust

DROP_OUTS = {
    "central": "a client that does not answer in time is not in the sum; the noise is, whatever arrives, and ε counts "
    "the client as drawn all the same. Taken to be so: whether a client answers depends on no other client's data but "
    "by way of what was released, and who answered stays with the server",
    "secagg": "a client that goes missing before its masked message has come is not in the sum, and ε counts it all "
    "the same; a sum over too few clients is never opened, and each attempt for which noise left a client counts as a "
    "release. Taken to be so: whether and when a client answers does not depend on its data",
    "local": "a message that does not come is not seen, and ε counts it all the same. Taken to be so: whether and when "
    "a client answers does not depend on its data",
    "silo": "a round counts at a client when it is computed, whether its message arrives or not. Taken to be so: "
    "whether and when a client answers does not depend on its records",
}
NETWORK = {
    "central": "whoever watches the network sees who is asked and who sends; ε counts on that staying secret, unless "
    "everyone takes part",
    "secagg": "when a client answers, and how long it takes, and in which sums it is",
    "local": "when a client answers, and how long it takes",
    "silo": "when a client answers, and how long it takes",
}
REPORTS = (
    "what clients report of the model on examples that they hold out: the server sees each client's exact figure, the "
    "run folder keeps them, and no noise protects them; a server that asks about models of its own making learns more"
)
HTTPS = "HTTPS; server and clients prove by their keys who they are, and each client runs its own copy of this program"


FLOWER = (
    "Flower: a SuperLink and SuperNodes, which see all that the server sees, carry the messages; each client signs "
    "with its key for which node it answers, and answers with its own copy of this program, unless its owner lets the "
    "app read the data"
)


def besides(plan: AnyPlan | None, report: bool = False, transport: str = HTTPS) -> tuple[tuple[str, str], ...]:
    """Returns what a federation's statement says besides, by name; `report` is whether clients do."""
    if plan is None:
        return ()
    clients = for_clients(plan)
    trusted = "silo" if clients is None else clients.mechanism.trust
    return (
        ("transport", transport),
        ("drop-outs", DROP_OUTS[trusted]),
        ("not covered", NETWORK[trusted]),
        *([("not covered", REPORTS)] if report else []),
    )


def promise(plan: AnyPlan | None, held_out: float | None = None) -> str:
    """Returns what a client is told before it takes part: what all rounds together cost it, and whom it trusts.

    Args:
        plan: the plan that all agreed on; None without privacy.
        held_out: share of its examples that a client holds out to report on; None: clients do not report.
    """
    report = "" if held_out is None else (
        f". Clients report: this one tells the server, exactly, how good the model is on {held_out:.0%} of its "
        "examples, which it holds out; no ε covers that"
    )  # fmt: skip
    if plan is None:
        return f"this federation promises nothing: the server sees exact messages{report}"
    clients, records, said = for_clients(plan), for_records(plan), list[str]()
    if clients is not None:
        said.append(f"{state(clients, plan.rounds).headline}. Trust: {trust(clients.mechanism)}")
    if records is not None:
        said.append(f"{state(records, plan.rounds).headline}, of {records.record}. Trust: {TRUST_OF_RECORDS}")
    return f"this federation promises, after {plan.rounds} rounds, {'; and '.join(said)}{report}"
