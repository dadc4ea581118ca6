"""The quickstart in Python: Fed-α-NormEC on scikit-learn's digits, 500 clients, ε = 4 for each of them.

Run it: python examples/quickstart.py
"""

import numpy as np

import fednormec as fn


def main(rounds: int = 60) -> fn.Trained:
    digits = fn.data.digits()
    train, test = fn.data.split(len(digits), 0.2, np.random.default_rng(0))
    parts = fn.data.iid(len(train), clients=500, rng=np.random.default_rng(1))
    data = fn.data.federate(digits.take(train), digits.take(test), parts)

    model = fn.models.linear(data.input_shape, data.num_classes)
    fn.models.reset(model, np.random.default_rng(2))
    problem = fn.NeuralProblem(model, data.clients, data.test)
    algorithm = fn.fed_normec(fn.gd(0.5, steps=5), beta=0.03, server_step=1.5, server_normalization=False)

    def show(r, record):
        if "test_accuracy" in record:
            print(f"round {r.number:4}  test accuracy {record['test_accuracy']:.1%}  ε {record['epsilon']:.2f}")

    result = fn.train(
        problem, algorithm, fn.poisson(0.25), fn.Privacy(epsilon=4, delta=1e-5), rounds=rounds, seed=0,
        observers=[fn.Observer(after=show)],
    )  # fmt: skip
    print(result.statement.text)
    return result


if __name__ == "__main__":
    main()
