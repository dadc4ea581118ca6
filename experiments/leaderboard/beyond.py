"""Claim: what `fednormec recommend` says is a good start on tasks that are not in the grid of pace.py, nets among them.

Digits and Fashion-MNIST with linear models, perceptrons and a conv net, seeds 1, 2 and 3, with what it says as it
stands. Some of these tasks were looked at when the rules were made: linear digits, for the noise that an output may
get; the digits' nets and Fashion-MNIST, for the steps of nets and for sgd. Beside it: the
same with momentum and a tenth of the step, and a net with the longer steps that a linear model gets.

Run it: python experiments/leaderboard/beyond.py            (some minutes; writes beyond.md)
Needs: fednormec data fetch fashion_mnist
"""

from pathlib import Path
from typing import Any, NamedTuple

from standings import cell, markdown

import fednormec as fn
from fednormec.config.assemble import assemble, rules
from fednormec.config.schema import changed

SEEDS = (1, 2, 3)
DIGITS: dict[str, Any] = {"source": "digits", "clients": 500}
FASHION: dict[str, Any] = {"source": "fashion_mnist", "clients": 2000}


class Case(NamedTuple):
    """A federation, and the public numbers that are asked with.

    Attributes:
        about: what it is, in words.
        data: section [data].
        model: section [model].
        epsilon: ε.
        p: share of clients per round.
        rounds: number of rounds.
        input_norm: length of an example's inputs.
        tuned: what tuned settings reached: of the quickstart (Fed-α-NormEC, seeds 0 to 4), and in
            experiments/private-at-scale.
    """

    about: str
    data: dict[str, Any]
    model: dict[str, Any]
    epsilon: float
    p: float
    rounds: int
    input_norm: float
    tuned: str = ""


EVENLY = {"partition": "iid"}
ONE_CLASS = {"partition": "shards", "shards_per_client": 1}
LINEAR: dict[str, Any] = {"name": "linear"}
HIDDEN: dict[int, dict[str, Any]] = {width: {"name": "mlp", "hidden": [width]} for width in (16, 32, 256)}
CASES = [
    Case("digits, linear", DIGITS | EVENLY, LINEAR, 1.0, 0.25, 60, 3.9),
    Case("digits, linear", DIGITS | EVENLY, LINEAR, 4.0, 0.25, 60, 3.9, "91.1"),
    Case("digits, linear", DIGITS | EVENLY, LINEAR, 8.0, 0.25, 60, 3.9),
    Case("digits, linear, one class per client", DIGITS | ONE_CLASS, LINEAR, 4.0, 0.25, 60, 3.9),
    Case("digits, 32 hidden", DIGITS | EVENLY, HIDDEN[32], 1.0, 0.25, 60, 3.9),
    Case("digits, 32 hidden", DIGITS | EVENLY, HIDDEN[32], 8.0, 0.25, 60, 3.9),
    Case("digits, 256 hidden", DIGITS | EVENLY, HIDDEN[256], 4.0, 0.25, 60, 3.9),
    Case("digits, conv net", DIGITS | EVENLY, {"name": "small_cnn"}, 4.0, 0.25, 60, 3.9),
    Case("Fashion-MNIST, 16 hidden", FASHION | EVENLY, HIDDEN[16], 1.0, 0.1, 50, 28.0, "80.4"),
    Case("Fashion-MNIST, 16 hidden", FASHION | EVENLY, HIDDEN[16], 8.0, 0.1, 50, 28.0, "82.0"),
]


def figures(case: Case, linear: bool, momentum: bool = False) -> tuple[list[float], fn.Recommendation]:
    """The accuracy on each seed, and what was recommended."""
    found = []
    for seed in SEEDS:
        problem = assemble({
            "data": case.data, "model": case.model, "local": {"step": 1.0}, "run": {"seed": seed},
        }).problem  # fmt: skip
        asked = fn.recommend(
            clients=problem.num_clients, dim=problem.dim, epsilon=case.epsilon, p=case.p, rounds=case.rounds,
            input_norm=case.input_norm, linear=linear,
        )  # fmt: skip
        step = asked.config["method"]["server_step"] / (10 if momentum else 1)
        changes = {"server.name": "momentum" if momentum else "sgd", "method.server_step": step}
        method, participation, privacy, run, _ = rules(changed(asked.config, changes))
        done = fn.train(
            problem, method, participation, privacy, rounds=run.rounds, seed=seed, evaluate_every=run.rounds
        )
        found.append(0.0 if done.diverged else float(done.history[-1]["test_accuracy"]))
    return found, asked


def main() -> None:
    names = [
        "task",
        "parameters",
        "ε",
        "p",
        "rounds",
        "step",
        "accuracy",
        "momentum",
        "steps of a linear model",
        "tuned",
    ]
    lines = [names, ["---"] * len(names)]
    for case in CASES:
        linear = case.model == LINEAR
        values, asked = figures(case, linear)
        step = asked.config["method"]["server_step"]
        lines.append([
            case.about, f"{asked.situation.dim:,}", f"{case.epsilon:g}", f"{case.p:g}", str(asked.plan.planned),
            f"{step:g}", cell(values), cell(figures(case, linear, momentum=True)[0]),
            "" if linear else cell(figures(case, linear=True)[0]), case.tuned,
        ])  # fmt: skip
        print(lines[-1], flush=True)
    Path(__file__).with_suffix(".md").write_text(f"# Beyond\n\n{markdown(lines)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
