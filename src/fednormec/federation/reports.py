"""Server's side of what clients report of a model: who is asked, and what is taken. Not private."""

import math
import secrets
from collections.abc import Callable, Mapping

from torch import Tensor

from fednormec.engine.figures import CLIENT, figure_of
from fednormec.federation.messages import REFUSED, Refused, Report, Request, read_report

Ask = Callable[[Mapping[int, Request]], Mapping[int, Report | Refused]]


class Reporting:
    """Reports of clients about a model, as the server asks for them.

    Args:
        names: names of the clients.
        run: called for the name of the training.
        agreed: digest of what all must agree on.
        ask: sends each client its request and returns what was answered in time.
        tell: called with what the server's operator should know.
    """

    def __init__(
        self, names: tuple[str, ...], run: Callable[[], str], agreed: str, ask: Ask, tell: Callable[[str], None]
    ) -> None:
        self._names, self._run, self._agreed, self._ask, self._tell = names, run, agreed, ask, tell
        self._told: set[int] = set()

    def __call__(self, x: Tensor, name: str) -> list[float]:
        """Returns the figure of this name of every client that reports one."""
        run, everyone = self._run(), range(len(self._names))
        requests = {i: Request(run, self._agreed, 0, 0, False, secrets.token_bytes(16), x) for i in everyone}
        found, values = self._ask(requests), list[float]()
        for client, report in sorted(found.items()):
            try:
                values.append(taken_report(report, requests[client], name))
            except Refused as why:
                if client not in self._told:  # the first time; who says nothing is not in the figures
                    self._told.add(client)
                    self._tell(f"{self._names[client]} reported nothing that counts: {why}")
        return values


def as_report(data: bytes) -> Report | Refused:
    """Returns the report in an answer, or why it is none."""
    try:
        return read_report(data)
    except Refused as why:
        return why


def taken_report(report: Report | Refused, request: Request, name: str) -> float:
    """Returns the figure that was reported; raises Refused if it is none of this name, or answers something else."""
    if isinstance(report, Refused):
        raise report
    if report.status == REFUSED:
        raise Refused(f"it says: {report.why}")
    if not secrets.compare_digest(report.nonce, request.nonce):
        raise Refused("it answers another request")
    if report.name != name:
        raise Refused(f"it reports the {report.name}, not the {name}")
    share = figure_of(f"{CLIENT}{name}").is_share
    if not math.isfinite(report.value) or (share and not 0 <= report.value <= 1):
        raise Refused(f"its {name} is {report.value:g}")
    return report.value
