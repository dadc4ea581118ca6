"""The quickstart in Python: Fed-α-NormEC on scikit-learn's digits, 20 clients with unlike data, no noise.

Run it: python examples/quickstart.py
"""

import numpy as np

import fednormec as fn


def main(rounds: int = 200) -> fn.Trained:
    digits = fn.data.digits()
    train, test = fn.data.split(len(digits), 0.2, np.random.default_rng(0))
    parts = fn.data.dirichlet(digits.y[train], clients=20, concentration=0.5, rng=np.random.default_rng(1))
    data = fn.data.federate(digits.take(train), digits.take(test), parts)

    model = fn.models.mlp(data.input_shape, data.num_classes)
    fn.models.reset(model, np.random.default_rng(2))
    problem = fn.NeuralProblem(model, data.clients, data.test)
    algorithm = fn.fed_normec(fn.gd(0.5, steps=5), beta=0.03, server_step=1.0, server_normalization=False)

    def show(r: fn.Round) -> None:
        if r.metrics is not None:
            print(f"round {r.number:4}  test accuracy {r.metrics.public['test_accuracy']:.1%}")

    return fn.train(problem, algorithm, fn.poisson(0.25), rounds=rounds, seed=0, on_round=show)


if __name__ == "__main__":
    main()
