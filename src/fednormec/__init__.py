"""Differentially private federated learning with guarantees: Fed-alpha-NormEC and its family.

Names are imported when first used, so that `fednormec --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fednormec import data as data
    from fednormec import models as models
    from fednormec import theory as theory
    from fednormec.algorithms.base import Algorithm as Algorithm
    from fednormec.algorithms.base import Server as Server
    from fednormec.algorithms.named import METHODS as METHODS
    from fednormec.algorithms.named import alpha_normec as alpha_normec
    from fednormec.algorithms.named import clip21 as clip21
    from fednormec.algorithms.named import clip21_sgd2m as clip21_sgd2m
    from fednormec.algorithms.named import dp_fed_avg_clip as dp_fed_avg_clip
    from fednormec.algorithms.named import dp_fed_avg_normalized as dp_fed_avg_normalized
    from fednormec.algorithms.named import dp_scaffold as dp_scaffold
    from fednormec.algorithms.named import ef21 as ef21
    from fednormec.algorithms.named import fed_avg as fed_avg
    from fednormec.algorithms.named import fed_normec as fed_normec
    from fednormec.algorithms.named import scaffold as scaffold
    from fednormec.bounds import Messages as Messages
    from fednormec.bounds import clip as clip
    from fednormec.bounds import identity as identity
    from fednormec.bounds import smooth_normalize as smooth_normalize
    from fednormec.bounds import top_k as top_k
    from fednormec.checking import MethodCheck as MethodCheck
    from fednormec.checking import check_method as check_method
    from fednormec.engine import Round as Round
    from fednormec.engine import Trained as Trained
    from fednormec.engine import simulate as simulate
    from fednormec.engine import train as train
    from fednormec.errors import BoundBroken as BoundBroken
    from fednormec.errors import Diverged as Diverged
    from fednormec.errors import UserError as UserError
    from fednormec.faults import faulty as faulty
    from fednormec.local import gd as gd
    from fednormec.local import ig as ig
    from fednormec.local import sgd as sgd
    from fednormec.participation import fixed_size as fixed_size
    from fednormec.participation import full as full
    from fednormec.participation import poisson as poisson
    from fednormec.privacy.audit import Audit as Audit
    from fednormec.privacy.audit import audit_mechanism as audit_mechanism
    from fednormec.privacy.audit import audit_training as audit_training
    from fednormec.privacy.ledger import read_ledger as read_ledger
    from fednormec.privacy.mechanism import Mechanism as Mechanism
    from fednormec.privacy.mechanism import Privacy as Privacy
    from fednormec.privacy.statement import Statement as Statement
    from fednormec.problems.base import Problem as Problem
    from fednormec.problems.logistic import Logistic as Logistic
    from fednormec.problems.logistic import random_logistic as random_logistic
    from fednormec.problems.neural import NeuralProblem as NeuralProblem
    from fednormec.problems.quadratic import Quadratic as Quadratic
    from fednormec.problems.quadratic import random_quadratic as random_quadratic
    from fednormec.ray_engine import Ray as Ray

_HOMES = {
    "algorithms.base": ("Algorithm", "Server"),
    "algorithms.named": (
        "METHODS", "alpha_normec", "clip21", "clip21_sgd2m", "dp_fed_avg_clip", "dp_fed_avg_normalized",
        "dp_scaffold", "ef21", "fed_avg", "fed_normec", "scaffold",
    ),
    "bounds": ("Messages", "clip", "identity", "smooth_normalize", "top_k"),
    "checking": ("MethodCheck", "check_method"),
    "errors": ("BoundBroken", "Diverged", "UserError"),
    "faults": ("faulty",),
    "local": ("gd", "ig", "sgd"),
    "participation": ("fixed_size", "full", "poisson"),
    "privacy.audit": ("Audit", "audit_mechanism", "audit_training"),
    "privacy.ledger": ("read_ledger",),
    "privacy.mechanism": ("Mechanism", "Privacy"),
    "privacy.statement": ("Statement",),
    "problems.base": ("Problem",),
    "problems.logistic": ("Logistic", "random_logistic"),
    "problems.neural": ("NeuralProblem",),
    "problems.quadratic": ("Quadratic", "random_quadratic"),
    "ray_engine": ("Ray",),
    "engine": ("Round", "Trained", "simulate", "train"),
}  # fmt: skip
_MODULES = ("data", "models", "theory")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", *_MODULES, *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fednormec.{name}")
    if name in _HOME_OF:
        return getattr(import_module(f"fednormec.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'fednormec' has no attribute {name!r}")
