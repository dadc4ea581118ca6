"""Watch a run while it goes on: an early look at a metric, and the model saved after every tenth round.

Run it: python examples/observers.py
"""

import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

import fednormec as fn


def early_look(every: int) -> fn.Observer:
    """Prints the public figures of every so many rounds. What stands under "not_private" no ε covers."""

    def after(r: fn.Round, record: fn.Record) -> None:
        if r.number % every == 0:
            print(f"round {r.number:3}  test accuracy {record['test_accuracy']:.1%}  ε {record['epsilon']:.2f}")

    return fn.Observer(after=after, close=lambda end: print(f"over after {end.rounds} rounds: {end.why or 'all done'}"))


def save_models(problem: fn.Problem, folder: Path, every: int) -> fn.Observer:
    """Stores the model of every so many rounds; what is made of released models costs no ε."""

    def after(r: fn.Round, record: fn.Record) -> None:
        if r.number % every == 0:
            save_file(problem.named(r.x), folder / f"model-{r.number}.safetensors")

    return fn.Observer(after=after)


def main(rounds: int = 60) -> list[str]:
    digits = fn.data.digits()
    train, test = fn.data.split(len(digits), 0.2, np.random.default_rng(0))
    parts = fn.data.iid(len(train), 100, np.random.default_rng(1))
    data = fn.data.federate(digits.take(train), digits.take(test), parts)
    problem = fn.NeuralProblem(fn.models.linear(data.input_shape, data.num_classes), data.clients, data.test)
    algorithm = fn.fed_normec(fn.gd(0.5, steps=5), beta=0.03, server_step=1.5, server_normalization=False)
    with tempfile.TemporaryDirectory() as folder:
        fn.train(
            problem, algorithm, fn.poisson(0.25), fn.Privacy(epsilon=8), rounds=rounds, evaluate_every=5,
            observers=[early_look(every=20), save_models(problem, Path(folder), every=10)],
        )  # fmt: skip
        saved = sorted(path.name for path in Path(folder).iterdir())
    print(f"saved {len(saved)} models")
    return saved


if __name__ == "__main__":
    main()
