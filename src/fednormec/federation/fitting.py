"""Settings of a new federation that nobody chose: fitted to its clients and to whom they trust, or none at all."""

import math
from pathlib import Path

from fednormec.config.schema import Config, Section, read
from fednormec.errors import UserError, one_of
from fednormec.federation.agreement import NAME, for_server
from fednormec.privacy.outlook import ENOUGH, Outlook, outlook

TEMPLATE = Path(__file__).with_name(NAME)
TRUSTS = ("local", "secagg", "central")
MOST = 1.0  # decisive ratio from which on nothing is promised: half of what a config of one's own is warned of
# the method that bears most noise, and its server step where there is little noise and where there is much:
# experiments/outlook, 60 rounds
METHOD, FEW, MUCH = "dp_fed_avg_normalized", 0.8, 0.2


def fitted(federation: Section, trust: str | None) -> Config:
    """Returns settings that let these clients learn something.

    Args:
        federation: section [federation]: the clients, and the shapes of their examples.
        trust: "local" (nobody is trusted with a message), "secagg" (nobody is, and the server sees sums alone) or
            "central" (the server is); None: no privacy at all.

    Raises:
        UserError: if no model can be learnt with the noise that privacy needs. Then nothing is promised.
    """
    asked = read(TEMPLATE) | {"federation": federation}
    if trust is None:
        return {name: section for name, section in asked.items() if name != "privacy"}
    one_of("--trust", trust, TRUSTS)
    found = _outlook(asked, trust)
    if found.decisive >= MOST:
        raise UserError(_refusal(asked, trust))
    step = FEW if found.decisive <= ENOUGH else MUCH
    return asked | {"method": {"name": METHOD, "server_step": step}, "privacy": asked["privacy"] | {"trust": trust}}


def _outlook(asked: Config, trust: str) -> Outlook:
    private = asked["privacy"] | {"trust": trust}
    plan = for_server(asked | {"method": {"name": METHOD}, "privacy": private}, Path()).plan
    assert plan is not None
    return outlook(plan)


def _refusal(asked: Config, trust: str) -> str:
    clients, epsilon = len(asked["federation"]["clients"]), asked["privacy"]["epsilon"]
    least = {one: _least(_outlook(asked, one), clients) for one in TRUSTS}
    while _outlook(_with_clients(asked, least["secagg"]), "secagg").decisive >= MOST:
        least["secagg"] += 1  # how many may drop out is a whole number
    others = {
        "secagg": f", {least['secagg']:,} with --trust secagg (if enough of them are there in every round)",
        "central": f", {least['central']:,} with --trust central (if all trust the server)",
    }
    other = "".join(said for one, said in others.items() if TRUSTS.index(one) > TRUSTS.index(trust))
    return (
        f"nothing is promised to {clients} clients: the noise that ε = {epsilon:g} needs would leave them little or "
        f"nothing to learn from (noise to signal {_outlook(asked, trust).decisive:.2g}). It takes {least[trust]:,} "
        f"clients{other}; or settings of your own, CONFIG, with fewer parameters or a larger ε; or --not-private, with "
        "which the server sees exact messages."
    )


def _with_clients(asked: Config, clients: int) -> Config:
    names = [f"client-{number}" for number in range(clients)]
    return asked | {"federation": asked["federation"] | {"clients": names}}


def _least(found: Outlook, clients: int) -> int:
    """Returns how many clients would learn something: the ratio falls as their number, or as its root."""
    times = found.decisive / MOST
    return math.floor(clients * (times**2 if found.trust == "local" else times)) + 1
