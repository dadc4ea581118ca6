"""Recommend settings to start with: `fednormec recommend`."""

from typing import Annotated, cast

import typer

from fednormec.cli.options import AsJson

HELP = """Recommend settings to start a private run with. Public numbers suffice: no data are looked at.

It prints a config with the reason for each setting, the noise, and how much that leaves to learn from. The rules were
measured (docs/algorithm.md, "What to choose when"). They are a start: tuning may find something better.

\b
Examples:
  fednormec recommend --clients 2000 --dim 3440 --epsilon 2 > start.toml
  fednormec recommend --clients 2000 --dim 3440 --epsilon 2 --rounds 100 --p 0.1 --input-norm 18.5 --linear
  fednormec recommend --clients 50 --dim 650 --epsilon 8 --trust secagg
  fednormec recommend --clients 2000 --dim 3440 --epsilon 2 --json
  fednormec run start.toml --set data.source=mydata.npz
"""


def recommend(
    clients: Annotated[int, typer.Option(help="How many clients there are.")],
    dim: Annotated[int, typer.Option(help="How many parameters are trained.")],
    epsilon: Annotated[float, typer.Option(help="The ε that a run may cost.")],
    rounds: Annotated[int | None, typer.Option(help="How many rounds.", show_default="recommended")] = None,
    p: Annotated[
        float | None, typer.Option(help="Draw each client with this probability.", show_default="all take part")
    ] = None,
    delta: Annotated[float, typer.Option(help="The δ of the guarantee.")] = 1e-5,
    trust: Annotated[str, typer.Option(help="central, secagg or local.")] = "central",
    input_norm: Annotated[
        float | None,
        typer.Option(help="Typical length of one example's inputs: √F for F standardised numbers.", show_default="5"),
    ] = None,
    linear: Annotated[
        bool, typer.Option("--linear", help="The model is linear: no hidden layers. It can take longer steps.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    from fednormec.config import recommending
    from fednormec.files import to_json
    from fednormec.privacy.asked import Trust

    found = recommending.recommend(
        clients=clients, dim=dim, epsilon=epsilon, rounds=rounds, p=p, delta=delta, trust=cast(Trust, trust),
        input_norm=input_norm, linear=linear,
    )  # fmt: skip
    print(to_json(found.facts) if as_json else found.toml().rstrip())
