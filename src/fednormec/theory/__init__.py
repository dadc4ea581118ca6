"""Guarantees: what the paper prints (`printed`), what holds (`corrected`), which settings make it small (`planner`),
and what a run measures of it (`watch`).
May use: core, algorithms, problems, privacy, engine, config.
"""

from fednormec.theory.corrected import Course, Promise, follow, guarantee, promise
from fednormec.theory.guarantee import Condition, Guarantee
from fednormec.theory.planner import plan
from fednormec.theory.setting import Constants, Noise, Settings, constants_of, round_noise
from fednormec.theory.watch import Measured, measure

__all__ = [
    "Condition", "Constants", "Course", "Guarantee", "Measured", "Noise", "Promise", "Settings", "constants_of",
    "follow", "guarantee", "measure", "plan", "promise", "round_noise",
]  # fmt: skip
