"""Constructors that a config can name, by section: what an override keeps, and what the commands list."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fednormec.algorithms.methods import METHODS
from fednormec.algorithms.optimizers import OPTIMIZERS
from fednormec.config.assemble import LOCALS, PARTICIPATIONS, Table, problems
from fednormec.config.datasets import PARTITIONS
from fednormec.config.listing import Setting, about, settings_of
from fednormec.config.own import Loading
from fednormec.config.settings import RunSettings
from fednormec.config.signatures import Parameter, parameters
from fednormec.data import FederatedData
from fednormec.data.features import FEATURES
from fednormec.problems.models import MODELS, TOKEN_MODELS


class Constructor(NamedTuple):
    """Constructor that a section of a config names.

    Attributes:
        build: the constructor.
        given: number of first parameters that the program supplies, not the config.
    """

    build: Callable[..., Any]
    given: int = 0

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters that the config supplies, by name."""
        return parameters(self.build, self.given)

    @property
    def about(self) -> str:
        """What it builds, in a line."""
        return about(self.build)

    @property
    def settings(self) -> dict[str, Setting]:
        """Settings that the config supplies, by key, with what they mean."""
        return settings_of(self.build, self.given)


def _all(table: Table, given: int = 0) -> dict[str, Constructor]:
    return {name: Constructor(build, given) for name, build in table.items()}


def _no_data() -> FederatedData:
    raise AssertionError("these constructors are looked at, and not called")


CONSTRUCTORS: dict[str, dict[str, Constructor]] = {
    "problem": _all(problems({}, {}, RunSettings(), _no_data, Loading())),
    "data": _all(PARTITIONS, given=3),
    "features": _all(FEATURES),
    "model": _all({**MODELS, **TOKEN_MODELS}, given=2),
    "local": _all(LOCALS),
    "method": {name: Constructor(method.build, int(method.takes_local)) for name, method in METHODS.items()},
    "server": {name: Constructor(optimizer.build) for name, optimizer in OPTIMIZERS.items()},
    "participation": _all(PARTICIPATIONS),
}
