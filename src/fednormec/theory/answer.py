"""Answer of `fednormec theory`: a plan for a config, its guarantee term by term, and that of its own settings."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from fednormec.config.schema import Config
from fednormec.errors import UserError
from fednormec.privacy.asked import Privacy
from fednormec.privacy.mechanism import MOST
from fednormec.privacy.mechanism import plan as privacy_plan
from fednormec.theory.corrected import Promise
from fednormec.theory.guarantee import Guarantee
from fednormec.theory.planner import plan, plan_exactly
from fednormec.theory.printed import theorem_local_gd, theorem_local_ig
from fednormec.theory.question import Question, ask, own_promise
from fednormec.theory.setting import Constants, Noise, round_noise

PLANNED = ("alpha", "beta", "server_step", "local_step", "warmup_rounds", "rounds")
LOCAL_NAMES = {"one_step": "one local step", "gd": "several local steps", "ig": "incremental local steps"}
CONSTANTS = {
    "smoothness": "L, of every component",
    "gap": "f(x⁰) − f^inf",
    "gradient_norm": "‖∇f(x⁰)‖",
    "client_norm": "max ‖∇f_i(x⁰)‖",
    "heterogeneity": "f^inf − mean f_i^inf",
    "component_norm": "max over clients of the mean ‖∇f_ij(x⁰)‖",
    "component_heterogeneity": "f^inf − mean f_ij^inf",
}
NOT_PRIVATE = "computed from the clients' data: not private, and no ε covers what follows from them"


class Answer(NamedTuple):
    """Answer to a question: the plan with its guarantee; the config's own guarantee, or why no theorem covers it."""

    question: Question
    planned: Promise
    own: Promise | None
    why_not: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the plan, by name."""
        s = self.planned.settings
        return {name: getattr(s, name) for name in PLANNED} | {"server_normalization": True, "initial_memory": s.memory}

    @property
    def printed(self) -> Guarantee | None:
        """The paper's own theorem at the plan's settings, for comparison; None where a constant of it is not known."""
        return as_printed(self.planned)

    def facts(self) -> dict[str, Any]:
        """Returns every number by name."""
        q = self.question
        own = {"covered": self.own is not None, "why_not": self.why_not}
        return {
            "constants": {name: value for name, value in asdict(q.constants).items() if value is not None},
            "constants_from_data": q.from_data,
            "local": q.local,
            "participation": q.rules.participation.name,
            "privacy": None if q.rules.privacy is None else asdict(q.rules.privacy),
            "round_budget": q.rounds,
            "plan": self.settings | _noise_std(q, self.planned.settings.rounds),
            **self.planned.facts(),
            "as_printed": self.printed and self.printed.facts(),
            "this_config": own if self.own is None else own | self.own.facts(),
        }

    def text(self) -> str:
        """Returns all of it for a person."""
        return "\n".join(_text(self))


def answer(config: Config) -> Answer:
    """Answers with the plan for a config, and what its own settings guarantee."""
    question = ask(config)
    memory = question.rules.config["method"]["initial_memory"]
    planned = plan(question.constants, question.local, question.noise_at, question.rounds, memory)
    try:
        return Answer(question, planned, own_promise(question), None)
    except UserError as error:
        return Answer(question, planned, None, str(error))


def with_plan(config: Config, found: Answer) -> Config:
    """Returns the config with the plan's settings in place of its own.

    Where they follow from the clients' data it has a note for the statement.
    """
    s = found.planned.settings
    method = {
        "alpha": s.alpha, "beta": s.beta, "server_step": s.server_step, "server_normalization": True,
        "warmup_rounds": s.warmup_rounds, "initial_memory": s.memory,
    }  # fmt: skip
    planned = {name: dict(section) for name, section in config.items()}
    planned["method"] = planned.get("method", {}) | method
    planned["run"] = planned.get("run", {}) | {"rounds": s.rounds}
    if "local" in found.question.rules.config:
        planned["local"] = planned.get("local", {}) | {"step": s.local_step}
    if "privacy" in planned and found.question.from_data:
        planned["privacy"] |= {"settings_from_data": True}
    return planned


def as_printed(promise: Promise) -> Guarantee | None:
    """Bound of Theorem 1 or 2 at the settings of a promise. R is the least error that the corrected lemma keeps.

    None where Delta^inf, which the paper needs even with one local step, is not known.
    """
    c, s = promise.constants, promise.settings
    if c.heterogeneity is None:
        return None
    theorem = theorem_local_ig if s.local == "ig" else theorem_local_gd
    return theorem(c, s, promise.noise, promise.found.settings["memory_error"])


def with_epsilon(question: Question, epsilon: float) -> Privacy:
    """Returns the config's privacy with another budget; central and δ = 1e-5 where it has none."""
    asked = question.rules.privacy or Privacy(epsilon=epsilon)
    return replace(asked, epsilon=epsilon, noise_std=None, calibration="exact", noise_scale="per_coordinate")


def _noise_std(q: Question, rounds: int) -> dict[str, Any]:
    agreed = q.agreed(q.rules.privacy, rounds)
    if agreed is None:
        return {}
    return {"noise_std": agreed.mechanism.noise_std, "epsilon": agreed.epsilon(rounds), **agreed.label}


def _text(found: Answer) -> Iterator[str]:
    q, s = found.question, found.planned.settings
    c = q.constants
    privacy = "no privacy" if q.rules.privacy is None else _privacy(q, s.rounds)
    yield (
        f"Fed-α-NormEC: {c.clients:,} clients, {c.dim:,} parameters, {LOCAL_NAMES[q.local]}, "
        f"{q.rules.participation.name} participation, {privacy}"
    )
    yield f"constants      {NOT_PRIVATE if q.from_data else 'as given'}"
    for name, meaning in CONSTANTS.items():
        value = getattr(c, name)
        if value is not None:
            yield f"  {name:<24} {value:>10.4g}  {meaning}{'  (given)' if q.from_data and name in q.given else ''}"
    asked = q.rules.run.rounds
    yield f"plan           of at most {q.rounds:,} rounds" + (
        "" if q.rounds == asked else f": with this noise the budget pays for no more of the {asked:,}"
    )
    for name in PLANNED:
        if name != "local_step" or q.local != "one_step":
            yield f"  {name:<24} {_number(getattr(s, name)):>10}"
    if s.memory != "zero":
        yield f"  {'initial_memory':<24} {s.memory}"
    yield from _verdict(found)
    yield from _table(found)
    yield from _own(found)


def _privacy(q: Question, rounds: int) -> str:
    agreed = q.agreed(q.rules.privacy, rounds)
    assert agreed is not None
    spent = f"ε = {agreed.epsilon(rounds):.4g} at δ = {agreed.delta:g} ({agreed.mechanism.trust})"
    return " ".join([spent, *agreed.label.values()])


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _verdict(found: Answer) -> Iterator[str]:
    planned, at_start = found.planned, found.question.constants.gradient_norm
    bound = planned.found.bound
    if not planned.vacuous:
        yield f"guarantee      min E‖∇f(x)‖ ≤ {bound:.4g}, which is {bound / at_start:.1%} of ‖∇f(x⁰)‖ = {at_start:.4g}"
        return
    yield (
        f"guarantee      VACUOUS: the least bound found is {bound:.4g}, not below ‖∇f(x⁰)‖ = {at_start:.4g}: it "
        "promises nothing that standing still would not."
    )
    course = planned.course
    if course.bound < at_start:
        yield f"               Followed round by round it is {course.bound:.4g}, which does say something."
    for line in advice(found):
        yield f"               {line}"


def advice(found: Answer) -> Iterator[str]:
    """Yields what would make a vacuous bound say something, the rest staying as it is."""
    q, rounds = found.question, found.planned.settings.rounds
    terms = found.planned.found.terms
    yield f"Its largest term is {max(terms, key=lambda name: terms[name])}."
    memory = found.planned.settings.memory

    def enough(constants: Constants, noise: Noise, rounds: int) -> bool:
        return not plan_exactly(constants, q.local, noise, rounds, memory).vacuous

    for clients in (q.constants.clients * 2**k for k in range(1, 15)):
        many = replace(q.constants, clients=clients)
        if clients <= MOST and enough(many, _noise_of(q, clients, rounds), rounds):
            yield f"About {clients:,} such clients would be enough."
            break
    if q.rules.privacy is not None and q.rules.privacy.epsilon is not None:
        for epsilon in (q.rules.privacy.epsilon * 2.0**k for k in range(1, 8)):
            if enough(q.constants, q.noise_with(with_epsilon(q, epsilon))(rounds), rounds):
                yield f"About ε = {epsilon:g} would be enough."
                break
    for longer in (rounds * 4**k for k in range(1, 6) if q.rounds == q.rules.run.rounds):
        if longer > q.rounds and enough(q.constants, _noise_of(q, q.constants.clients, longer), longer):
            yield f"About {longer:,} rounds would be enough."
            break


def _noise_of(q: Question, clients: int, rounds: int) -> Noise:
    """Returns the noise of a round if there were so many clients, each drawn as often."""
    mechanism = None
    if q.rules.privacy is not None:
        radius, who = q.rules.algorithm.bound.radius, q.rules.participation
        mechanism = privacy_plan(q.rules.privacy, clients, who, radius, q.constants.dim, rounds).mechanism
    return round_noise(clients, q.constants.dim, q.rate, mechanism)


def _table(found: Answer) -> Iterator[str]:
    closed, course, printed = found.planned.found, found.planned.course, found.printed
    meaning = _meanings(found.planned)
    theirs = {} if printed is None else printed.terms
    yield f"  {'term':<16}{'closed form':>12}{'round by round':>16}{'as printed' if printed else '':>12}".rstrip()
    columns = [closed.terms, course.terms, theirs]
    names = [*closed.terms, *(name for name in theirs if name not in closed.terms)]
    for name in names:
        cells = [f"{column[name]:.4g}" if name in column else "" for column in columns]
        yield f"  {name:<16}{cells[0]:>12}{cells[1]:>16}{cells[2]:>12}   {meaning.get(name, '')}".rstrip()
    total = "" if printed is None else f"{printed.bound:>12.4g}"
    yield f"  {'sum':<16}{closed.bound:>12.4g}{course.bound:>16.4g}{total}"
    if printed is not None and not printed.holds:
        broken = "; ".join(c.name for c in printed.conditions if not c.holds)
        yield f"  {printed.source}: its conditions do not hold here ({broken})"


def _meanings(promise: Promise) -> dict[str, str]:
    s, R = promise.settings, promise.found.settings["memory_error"]
    return {
        "initial": f"c₀ (f(x⁰) − f^inf)/(η n), n = {s.steps:,} rounds that move the model",
        "memory": f"2R, the memories' error, at most R = {R:.4g}",
        "noise": f"2β√(ν {s.rounds:,}): sampling ν = {promise.noise.sampling:.3g}, privacy {promise.noise.privacy:.3g}",
        "server_step": "ηL/2, the length of a step",
        "drift": "local steps leave the gradient" if s.local != "one_step" else "none with one local step",
    }


def _own(found: Answer) -> Iterator[str]:
    if found.own is None:
        yield f"this config    has no guarantee as it stands: {found.why_not}"
        return
    own, at_start = found.own, found.question.constants.gradient_norm
    if not own.found.holds:
        yield f"this config    has no closed bound as it stands: {'; '.join(own.found.broken)}"
    else:
        yield f"this config    as it stands: bound {own.found.bound:.4g}{' (vacuous)' if own.vacuous else ''}"
    followed = own.course.bound
    yield f"               followed round by round: {followed:.4g}{'' if followed < at_start else ' (vacuous)'}"
