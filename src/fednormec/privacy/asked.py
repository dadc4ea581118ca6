"""Privacy as it is asked for: what a run must keep to, for clients, for records, or for both."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np

from fednormec.errors import UserError, one_of, positive

Unit = Literal["client", "record"]
Trust = Literal["central", "secagg", "local"]
Adjacency = Literal["zero_out", "replace_one"]
Draws = Literal["honest", "server"]
Noise = Literal["continuous", "discrete"]
UNITS: tuple[Unit, ...] = ("client", "record")
TRUSTS: tuple[Trust, ...] = ("central", "secagg", "local")
SILO: Literal["silo"] = "silo"  # whom records trust: the client that has them, and nobody else
OF_CLIENTS = ("colluders", "min_cohort", "calibration", "noise_scale", "draws", "protocol", "min_survivors")
ADJACENCIES: tuple[Adjacency, ...] = ("zero_out", "replace_one")
NOISES: tuple[Noise, ...] = ("continuous", "discrete")
PAPER, TOTAL_NORM = "paper", "total_norm"
LEAST_DELTA = 1e-300  # below it probabilities are no longer numbers


@dataclass(frozen=True)
class Privacy:
    """Privacy that a run must keep to, [privacy] in a config.

    Args:
        epsilon: the budget. Alone, the noise is calibrated so that the planned rounds just fit; together with
            noise_std, the run stops before the round that would exceed it.
        delta: the δ at which every ε is stated.
        noise_std: noise on every coordinate, relative to the bound's radius: of the sum (central) or of each message.
        trust: "central" (an aggregator is trusted with the cohort and the exact sum, and adds the noise), "secagg" (the
            server sees who takes part, and the sum of messages that carry noise already) or "local" (it sees each
            message). Of records alone always "silo": nobody but the client that has them is trusted.
        adjacency: "zero_out" (a client's messages become 0) or "replace_one" (they become any others).
        colluders: number of clients who tell the server their own noise; matters in secagg.
        min_cohort: in secagg, a round with fewer senders is called off.
        protocol: in secagg, whether the stages of secure aggregation really run: clients draw their own noise and mask
            their messages, and the server opens the sum alone. Noise and keys then come from the operating system, and
            ε is that of clients that are asked in every round by a server that nobody trusts: randomness, noise and
            draws become "secure", "discrete" and "server". False: only its noise and its ε are those of secure
            aggregation, and the server here adds up what it sees.
        min_survivors: with the protocol, number of messages in a sum, at least, which clients enforce; ε counts on
            their noise. None: 70 % of those that are drawn, rounded up, and at least 2.
        tuning_runs: number of runs on the same clients that the ε must cover, this one included.
        calibration: "exact", or "paper": σ = p √(rounds log(1/δ))/ε, whose true ε is another and is what gets reported.
        noise_scale: "per_coordinate", or "total_norm": std/√d per coordinate, as in the paper's experiments. NOT
            PRIVATE.
        randomness: "seeded" (repeatable, for simulation) or "secure" (from the operating system, for deployment).
        noise: "discrete" (whole numbers on a grid, to which messages are rounded: nothing shows in low bits) or
            "continuous" (floating-point numbers, with a seed only). None: discrete where noise comes from the operating
            system.
        stream: seeded runs with the same seed and different streams draw cohorts and noise of their own; with one
            stream they share them, and what one publishes undoes the noise of the other.
        settings_from_data: whether other settings were chosen by a look at the clients' data, such as a plan from
            computed constants: changes nothing but the statement, which says that ε does not cover it.
        draws: "honest" (who takes part is drawn as the settings say) or, in local, "server" (a server that nobody
            trusts draws: ε is that of clients that are asked in every round, as always in a federation).
        unit: what is protected: a "client" with its whole data set, a "record" of a client's, whose local steps then
            are dp_sgd and who trusts that client alone, or both, each with an ε of its own. Where it is records alone,
            what is said of clients here is said of them, noise_std is relative to tau of dp_sgd, and trust is "silo".
        silo_epsilons: with records, the budget of each client's, in their order, in place of one for all.
        record_epsilon: with both units, the budget of a record.
        record_delta: with both units, the δ of its ε; None: delta.
        record_noise_std: with both units, the noise of each local step, as noise_std.
        record_adjacency: with both units, who is a neighbour among records; None: adjacency.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    noise_std: float | None = None
    trust: Literal["central", "secagg", "local", "silo"] = "central"
    adjacency: Adjacency = "zero_out"
    colluders: int = 0
    min_cohort: int = 1
    tuning_runs: int = 1
    calibration: Literal["exact", "paper"] = "exact"
    noise_scale: Literal["per_coordinate", "total_norm"] = "per_coordinate"
    randomness: Literal["seeded", "secure"] = "seeded"
    stream: int = 0
    settings_from_data: bool = False
    draws: Draws = "honest"
    noise: Noise | None = None
    protocol: bool = False
    min_survivors: int | None = None
    unit: Unit | Sequence[Unit] = "client"
    silo_epsilons: Sequence[float] | None = None
    record_epsilon: float | None = None
    record_delta: float | None = None
    record_noise_std: float | None = None
    record_adjacency: Adjacency | None = None

    def __post_init__(self) -> None:
        self._require_units()
        for name in ("epsilon", "noise_std", "record_epsilon", "record_noise_std"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.epsilon is None and self.noise_std is None and (self.for_clients or self.silo_epsilons is None):
            raise UserError("privacy needs epsilon (the noise is then calibrated) or noise_std, or both.")
        require_delta(self.delta)
        for name, least in (("tuning_runs", 1), ("min_cohort", 1), ("colluders", 0)):
            object.__setattr__(self, name, _count(name, getattr(self, name), least))  # of numpy, too
        if type(self.protocol) is not bool:
            raise UserError(f"protocol must be true or false, not {self.protocol!r}.")
        require_stream(self.stream)
        one_of("trust", self.trust, TRUSTS if self.for_clients else (SILO,))
        one_of("adjacency", self.adjacency, ADJACENCIES)
        one_of("draws", self.draws, ("honest", "server"))
        one_of("calibration", self.calibration, ("exact", PAPER))
        one_of("noise_scale", self.noise_scale, ("per_coordinate", TOTAL_NORM))
        one_of("randomness", self.randomness, ("seeded", "secure"))
        if self.noise is not None:
            one_of("noise", self.noise, NOISES)
        if self.protocol and self.trust != "secagg":
            raise UserError(f"protocol = true is for trust = 'secagg', whose stages it runs; not for '{self.trust}'.")
        if self.protocol and self.noise == "continuous":
            raise UserError("secure aggregation adds whole numbers: leave privacy.noise out, or set it to 'discrete'.")
        if self.protocol and self.min_cohort > 1:
            raise UserError("min_cohort is for a simulation of secure aggregation; where the protocol runs, clients "
                            "enforce min_survivors: set that.")  # fmt: skip
        if self.protocol:  # what really happens, wherever these settings are shown
            object.__setattr__(self, "randomness", "secure")
            object.__setattr__(self, "noise", "discrete")
            object.__setattr__(self, "draws", "server")
        if self.secure and not self.discrete:
            raise UserError("secure noise that is continuous shows in the low bits of the sums who sent nothing: leave "
                            "privacy.noise out, which puts noise on a grid.")  # fmt: skip
        if self.min_survivors is not None:
            if not self.protocol:
                raise UserError("min_survivors is for secure aggregation that really runs: set trust = 'secagg' and "
                                "protocol = true, or leave it out.")  # fmt: skip
            least = _count("min_survivors", self.min_survivors, 2, ": the sum over one is its message")
            object.__setattr__(self, "min_survivors", least)
        if self.calibration == PAPER and (self.epsilon is None or self.noise_std is not None):
            raise UserError("calibration = 'paper' computes the noise from epsilon: give epsilon and no noise_std.")
        if self.noise_scale == TOTAL_NORM and self.calibration != PAPER and self.noise_std is None:
            raise UserError("noise_scale = 'total_norm' is not private, so nothing can be calibrated for it: give "
                            "noise_std, or calibration = 'paper'.")  # fmt: skip

    def _require_units(self) -> None:
        """Raises UserError if what is protected is not said, or what is asked does not belong to it."""
        given = (self.unit,) if isinstance(self.unit, str) else tuple(self.unit)
        for unit in given:
            one_of("unit", unit, UNITS)
        if not given:
            raise UserError("unit must be 'client', 'record' or both, and it is an empty list.")
        units = tuple(unit for unit in UNITS if unit in given)
        object.__setattr__(self, "unit", units[0] if len(units) == 1 else units)
        own = ("record_epsilon", "record_delta", "record_noise_std", "record_adjacency")
        for name in (*(() if len(units) == 2 else own), *(() if "record" in units else ("silo_epsilons",))):
            if getattr(self, name) is not None:
                both = "unit = ['client', 'record']" if name in own else "unit = 'record'"
                raise UserError(f"{name} is for {both}: leave it out, or set that.")
        if self.silo_epsilons is not None:
            one = "epsilon" if len(units) == 1 else "record_epsilon"
            if getattr(self, one) is not None or not self.silo_epsilons:
                raise UserError(f"silo_epsilons has the budget of each client's records: leave {one} out, and give a "
                                "value for each client.")  # fmt: skip
            object.__setattr__(self, "silo_epsilons", tuple(positive("silo_epsilons", e) for e in self.silo_epsilons))
        if len(units) == 2 and not any((self.record_epsilon, self.record_noise_std, self.silo_epsilons)):
            raise UserError("unit = ['client', 'record'] needs the budget of records, too: record_epsilon (the noise "
                            "is then calibrated) or record_noise_std.")  # fmt: skip
        if self.record_delta is not None:
            require_delta(self.record_delta)
        if self.record_adjacency is not None:
            one_of("record_adjacency", self.record_adjacency, ADJACENCIES)
        if "client" in units:
            return
        usual = {field.name: field.default for field in fields(self)}
        for name in OF_CLIENTS:
            if getattr(self, name) != usual[name]:
                raise UserError(f"{name} is for clients as the unit, and here it is records: leave it out.")
        if self.trust not in ("central", SILO):
            raise UserError(f"with unit = 'record' nobody but the client is trusted with a record: leave trust = "
                            f"'{self.trust}' out.")  # fmt: skip
        object.__setattr__(self, "trust", SILO)

    @property
    def for_clients(self) -> bool:
        """True if clients are protected, each with its whole data set."""
        return "client" in self.unit

    @property
    def for_records(self) -> bool:
        """True if the records of clients are protected."""
        return "record" in self.unit

    @property
    def of_records(self) -> "Wanted":
        """Privacy that records must get."""
        both = self.for_clients
        epsilon = self.record_epsilon if both else self.epsilon
        epsilons: tuple[float, ...] | None = None if epsilon is None else (epsilon,)
        if self.silo_epsilons is not None:
            epsilons = tuple(self.silo_epsilons)
        delta, adjacency = self.record_delta if both else None, self.record_adjacency if both else None
        return Wanted(
            epsilons, self.delta if delta is None else delta, self.record_noise_std if both else self.noise_std,
            self.adjacency if adjacency is None else adjacency,
        )  # fmt: skip

    @property
    def secure(self) -> bool:
        """True if noise and cohorts come from the operating system."""
        return self.randomness == "secure"

    @property
    def discrete(self) -> bool:
        """True if messages and noise are whole numbers on a grid."""
        return self.secure if self.noise is None else self.noise == "discrete"


class Wanted(NamedTuple):
    """Privacy that records must get.

    Attributes:
        epsilons: the budget of each client's records, or one for all; None: no limit.
        delta: the δ of every ε.
        noise_std: noise of each local step, relative to the radius of a record's gradient; None: calibrated.
        adjacency: who is a neighbour.
    """

    epsilons: tuple[float, ...] | None
    delta: float
    noise_std: float | None
    adjacency: Adjacency


def require_delta(delta: float) -> float:
    """Returns δ; raises UserError if it is not strictly between 0 and 1, or too small to be accounted for."""
    if not 0 < delta < 1:
        raise UserError(f"delta must lie strictly between 0 and 1, not {delta}.")
    if delta < LEAST_DELTA:
        raise UserError(f"delta must be at least {LEAST_DELTA:g}, not {delta}: smaller ones cannot be accounted for.")
    return delta


def _count(name: str, value: int, least: int, why: str = "") -> int:
    """Returns a count; raises UserError if it is no whole number, or below `least`, and says why."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, not {value!r}.")
    if value < least:
        raise UserError(f"{name} must be at least {least}, not {value}{why}.")
    return int(value)


def require_stream(stream: int) -> int:
    """Returns the stream; raises UserError if it is not a whole number from 0 on."""
    if type(stream) is not int or stream < 0:
        raise UserError(f"stream must be a whole number from 0 on, not {stream!r}.")
    return stream
