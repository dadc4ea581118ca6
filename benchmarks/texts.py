"""What a client's batch of texts costs in nets of one width: a GRU, a causal transformer and our causal_net.

    python benchmarks/texts.py

Batches of 16 texts of 80 characters, 97 of them, made up; gradients at each client's own parameters, in one thread. The
figures are seconds of the processor, which other work on the machine disturbs less than the clock's.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fednormec as fn

TOKENS, LENGTH, BATCH = 97, 80, 16


class Recurrent(nn.Module):
    """GRU between an embedding and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(TOKENS, width), nn.GRU(width, width, batch_first=True)
        self.last = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.gru(self.embed(x))[0])
        return scores


class Attention(nn.Module):
    """Block of a causal transformer: four heads, then two linear layers."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("later", torch.triu(torch.full((LENGTH, LENGTH), -1e9), 1))

    def forward(self, h: Tensor) -> Tensor:
        n, t, width = h.shape
        parts = self.project(self.before(h)).chunk(3, dim=2)
        q, k, v = (part.reshape(n, t, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        looks = (torch.matmul(q, k.transpose(2, 3)) * (width // self.heads) ** -0.5 + self.later).softmax(dim=-1)
        h = h + self.join(torch.matmul(looks, v).transpose(1, 2).reshape(n, t, width))
        return h + self.down(F.relu(self.up(self.between(h))))


class Transformer(nn.Module):
    """Two such blocks on embedded tokens and places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(TOKENS, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks, self.last = nn.Sequential(Attention(width), Attention(width)), nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.blocks(self.embed(x) + self.places))
        return scores


NETS: dict[str, Callable[[int], nn.Module]] = {
    "causal_net": lambda width: fn.models.causal_net((LENGTH,), TOKENS, width=width),
    "GRU": Recurrent,
    "transformer": Transformer,
}


def seconds(problem: fn.NeuralProblem, points: Tensor, repeats: int) -> float:
    """The least processor time of all clients' gradients."""
    taken = []
    for _ in range(repeats):
        begin = time.thread_time()
        problem.grad(points, np.arange(len(points)))
        taken.append(time.thread_time() - begin)
    return min(taken)


def main(clients: int = 16, widths: tuple[int, ...] = (32, 64), repeats: int = 5) -> dict[tuple[str, int, str], float]:
    """Prints milliseconds per client and batch, and returns them."""
    torch.set_num_threads(1)
    rng, found = np.random.default_rng(0), dict[tuple[str, int, str], float]()
    texts = [tuple(rng.integers(0, TOKENS, (2, BATCH, LENGTH))) for _ in range(clients)]
    for width in widths:
        for name, build in NETS.items():
            for way in ("loop", "vmap") if name != "GRU" else ("loop",):  # a GRU is not vectorised over clients
                problem = fn.NeuralProblem(build(width), texts, vectorize=way)
                points = problem.init(rng).repeat(clients, 1)
                found[name, width, way] = 1000 * seconds(problem, points, repeats) / clients
                print(
                    f"{name:12} width {width:3}  {problem.dim:7,} parameters  {way}  {found[name, width, way]:5.1f} ms"
                )
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
