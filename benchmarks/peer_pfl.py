"""Seconds per central iteration of pfl's FederatedAveraging (Apple's pfl-research), for the benchmark's driver.

    python benchmarks/peer_pfl.py mlp [--threads N] [--workers N] [--check]
    python benchmarks/peer_pfl.py small_cnn --models src
    python benchmarks/peer_pfl.py resnet20 --models src

Prints one JSON line {"ready": true, "versions": {...}, "threads": n, "workers": n}; then, for every line "N" on
stdin, runs N rounds and prints {"seconds": [t1, ..., tN]}; ends at end of file. Nothing else goes to stdout.
--check instead prints the mean training loss before and after 20 rounds, and exits.

One round is one `FederatedAveraging.run` from central iteration k to k + 1: a second `run` of the same algorithm
object goes on where the first one stopped. It trains every client for one SGD step on its whole batch of 32, sums the
model differences, averages them and takes a step of the central optimizer (SGD, rate 1). pfl evaluates in iteration 0
whatever the evaluation frequency, so that one is run before "ready".

The configuration is the fastest found with pfl 0.6.0 and torch 2.13.0 on 2 shared cores; variants took turns, and on
mlp differences under 3 % are noise. Kept, with the cost of the alternative:
 - one worker process of one thread per core, by pfl's own distribution over torch.distributed (one process of two
   threads takes 1.6 times as long on mlp, 1.3 to 1.7 on small_cnn, 0.9 to 1.3 on resnet20, the latter the quieter run);
 - one local optimizer for all clients, which plain SGD allows as it keeps no state (a new torch.optim.SGD per client,
   as in pfl's examples: 7 % more on mlp; new ones with foreach=False, foreach=True or fused=True: 3 to 8 %);
 - local_batch_size None, which hands over the tensors as they are (32, which slices them: 3 %);
 - `Dataset` objects made once (one per client and round, as by `FederatedDataset.from_slices`: 1 %);
 - no evaluation, callbacks, postprocessors or metrics sent to the platform.
No gain from: PyTorchTensorDataset; use_torch_compile (pfl calls `loss` of the module inside the compiled one, which
stays uncompiled); torch.compile of the network or of the loss by hand; channels_last images and weights.
Not tried: bfloat16 (amp_dtype), as it computes something else.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from torch import nn
from workloads import BATCH, CLIENTS_AND_SHAPE, RATE, SEED, draw


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", choices=CLIENTS_AND_SHAPE)
    parser.add_argument("--models", metavar="SRC", help="folder that holds fednormec/, for small_cnn and resnet20")
    parser.add_argument("--epochs", type=int, default=1, help="passes over a client's 32 examples (default: 1)")
    parser.add_argument("--batch", type=int, help="examples a local step (default: all 32)")
    parser.add_argument("--threads", type=int, help="torch intra-op threads a worker (default: torch's own / workers)")
    parser.add_argument("--workers", type=int, help="processes (default: 1 with --threads, else one per core)")
    parser.add_argument("--check", action="store_true", help="print the loss before and after 20 rounds, and exit")
    args = parser.parse_args()
    if args.workload != "mlp" and not args.models:
        parser.error("this workload needs --models")
    clients, cores = CLIENTS_AND_SHAPE[args.workload][0], torch.get_num_threads()
    if args.workers is None:
        args.workers = 1 if args.threads else max(n for n in range(1, cores + 1) if clients % n == 0)
    if clients % args.workers:
        parser.error("--workers must divide the clients: else pfl's workers disagree on whose turn it is")
    args.threads = args.threads or max(1, cores // args.workers)
    return args


def start_other_workers(count):
    """Make this process rank 0 of `count` by the variables that pfl reads when imported, and start the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ.update(PFL_WORKER_ADDRESSES=",".join([address] * count), PFL_WORKER_RANK="0")
    command, quiet = [sys.executable, *sys.argv], {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    return [
        subprocess.Popen(command, env={**os.environ, "PFL_WORKER_RANK": str(rank)}, text=True, **quiet)
        for rank in range(1, count)
    ]


def build(args):
    """Two functions: one runs round number k and gives its seconds, the other gives the mean training loss."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(args.threads)
    np.random.seed(SEED)  # for pfl, whose workers must draw the same

    clients = CLIENTS_AND_SHAPE[args.workload][0]
    network, images, labels = draw(args.workload, args.models)
    network.loss = lambda x, y: nn.functional.cross_entropy(network(x), y)
    network.metrics = lambda x, y: {}

    datasets = [Dataset(raw_data) for raw_data in zip(images, labels, strict=True)]
    sampler = get_user_sampler("minimize_reuse", range(clients))  # takes turns: every round has every client once
    backend = SimulatedBackend(training_data=FederatedDataset(datasets.__getitem__, sampler), val_data=None)
    local_optimizer = torch.optim.SGD(network.parameters(), lr=RATE, foreach=False)
    central_optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, lambda parameters, lr: local_optimizer, central_optimizer)
    steps = args.epochs * (BATCH // (args.batch or BATCH))
    local = NNTrainHyperParams(
        local_num_epochs=args.epochs, local_learning_rate=RATE / steps, local_batch_size=args.batch
    )
    algorithm = FederatedAveraging()

    def run_round(k):
        params = NNAlgorithmParams(
            central_num_iterations=k + 1,
            evaluation_frequency=sys.maxsize,
            train_cohort_size=clients,
            val_cohort_size=None,
        )
        start = time.perf_counter()
        algorithm.run(params, backend, model, local, send_metrics_to_platform=False)
        return time.perf_counter() - start

    def mean_loss():
        with torch.no_grad():
            return sum(network.loss(*dataset.raw_data).item() for dataset in datasets) / clients

    return run_round, mean_loss


def main():
    args = parse()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr

    def say(**line):
        print(json.dumps(line), file=out, flush=True)

    is_first = "PFL_WORKER_RANK" not in os.environ
    others = start_other_workers(args.workers) if is_first and args.workers > 1 else []
    run_round, mean_loss = build(args)
    if args.check:
        before = mean_loss()
        for k in range(20):
            run_round(k)
        say(loss_before=before, loss_after=mean_loss())
    else:
        run_round(0)
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("pfl", "torch", "numpy")}}
        say(ready=True, versions=versions, threads=torch.get_num_threads(), workers=args.workers)
        done = 1
        for line in sys.stdin:
            for other in others:
                print(line, end="", file=other.stdin, flush=True)
            say(seconds=[run_round(k) for k in range(done, done + int(line))])
            done += int(line)
    for other in others:
        other.communicate()  # closes its stdin and waits for its end


if __name__ == "__main__":
    main()
