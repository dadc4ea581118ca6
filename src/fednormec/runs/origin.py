"""Origin of a run: what it began with that its config does not say, and that must be the same when it resumes."""

from pathlib import Path
from typing import Any

import numpy as np

from fednormec.config.assemble import Experiment
from fednormec.config.settings import PYTHON
from fednormec.core.fingerprint import fingerprint
from fednormec.core.problem import Identified, Problem
from fednormec.core.randomness import generator
from fednormec.data.names import BUILT_IN
from fednormec.files import digest
from fednormec.runs.start import starting_point

PROBED = 8  # number of clients whose gradients are looked at, of a problem that has no digest of its own
SAID = {
    "clients": "its clients hold other numbers of examples",
    "start": "it starts from another model (seed torch before you build the module, or give the same x0)",
    "data": "its data or its loss are others",
}


def origin(experiment: Experiment) -> dict[str, Any]:
    """Returns digests of what the clients hold. They look at clients' data: not private."""
    if PYTHON in experiment.config:
        return {"problem": _problem(experiment)}
    if experiment.data is not None:
        return {"data": experiment.data}
    source = str(experiment.config.get("data", {}).get("source", BUILT_IN[0]))
    return {"data": None if source in BUILT_IN else digest(Path(source))}  # the user's own file or folder may change


def differing(begun: Any, experiment: Experiment) -> str | None:
    """Returns in what the origin of a run differs from what it was, in words; None if it does not, or nobody knows.

    `begun` is the origin that the run wrote down when it began.
    """
    if not isinstance(begun, dict):
        return None
    now = origin(experiment)
    if "data" in begun and begun["data"] != now.get("data"):
        source = experiment.config["data"]["source"]
        return f"the data in {source} are not those that the run began with: put them back"
    before, parts = begun.get("problem"), now.get("problem", {})
    other = [said for name, said in SAID.items() if isinstance(before, dict) and before.get(name) != parts.get(name)]
    return f"the problem is not the one that the run began with: {other[0]}. Give the same problem" if other else None


def _problem(experiment: Experiment) -> dict[str, str]:
    problem = experiment.problem
    own = problem.digest() if isinstance(problem, Identified) else _probed(problem)
    return {
        "clients": fingerprint(problem.client_sizes),
        "start": fingerprint(starting_point(experiment)),
        "data": fingerprint(own),
    }


def _probed(problem: Problem) -> list[str]:
    """Returns lengths of a few clients' gradients where runs start, to two digits, which rounding hardly ever moves."""
    x = problem.init(generator(0, "init"))
    some = np.arange(min(problem.num_clients, problem.tile, PROBED))
    return [f"{length:.1e}" for length in problem.grad(x, some).double().norm(dim=1).tolist()]
