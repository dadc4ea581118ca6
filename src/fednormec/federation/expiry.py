"""Certificates that end: looked at when a session begins, and then once a day."""

import time
from pathlib import Path

from fednormec.errors import UserError
from fednormec.federation.keys import CA, CLIENT_CERTIFICATE, SERVER_CERTIFICATE, validity
from fednormec.federation.log import Log

DAY = 86_400.0
AUTHORITY = ("the federation's authority", "a new federation, by fednormec federation init, has a new one")
SERVER = ("the server's certificate", "fednormec federation renew makes a new one")
CLIENT = ("this client's certificate", "ask the server's operator for a new one")


class Expiring:
    """Certificates of a session. Called, it says once a day which of them soon ends.

    Args:
        folder: folder of the federation, or of a client.
        own: file of the certificate that is shown.
        log: told what its owner should know.
    """

    def __init__(self, folder: Path, own: str, log: Log) -> None:
        mine = SERVER if own == SERVER_CERTIFICATE else CLIENT
        self._files, self._log, self._looked = ((folder / own, mine), (folder / CA, AUTHORITY)), log, 0.0

    @classmethod
    def of_server(cls, folder: Path, log: Log) -> "Expiring":
        """Returns the server's; raises UserError if one does not hold now."""
        return cls(folder, SERVER_CERTIFICATE, log)._required()

    @classmethod
    def of_client(cls, folder: Path, log: Log) -> "Expiring":
        """Returns a client's; raises UserError if one does not hold now."""
        return cls(folder, CLIENT_CERTIFICATE, log)._required()

    def __call__(self) -> None:
        """Says which of them soon ends, or has ended, if nobody looked for a day."""
        if time.monotonic() - self._looked < DAY:
            return
        self._looked = time.monotonic()
        for path, about in self._files:
            try:
                wrong, soon = validity(path).trouble(*about)
            except UserError as error:  # such as a file that is just being replaced
                wrong, soon = str(error), None
            if wrong or soon:
                self._log.warn(wrong or soon)

    def _required(self) -> "Expiring":
        for path, about in self._files:
            wrong, _ = validity(path).trouble(*about)
            if wrong is not None:
                raise UserError(f"{wrong}.")
        self._looked = float("-inf")
        self()
        return self
