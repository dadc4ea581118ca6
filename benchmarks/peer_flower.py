"""Seconds per round of Flower's simulation engine with its FedAvg, for the benchmark's driver.

    python benchmarks/peer_flower.py mlp [--as-shipped] [--workers N] [--threads N] [--check]
    python benchmarks/peer_flower.py small_cnn --models src
    python benchmarks/peer_flower.py resnet20 --models src

Prints one JSON line {"ready": true, "versions": {...}, "threads": n, "workers": n}; then, for every line "N" on
stdin, runs N rounds and prints {"seconds": [t1, ..., tN]}; ends at end of file. Nothing else goes to stdout.
--check instead prints the mean training loss before and after 20 rounds, and exits.

One round is one `FedAvg.start` with num_rounds=1, from the current model to the averaged one: a message to every
client, one SGD step on its whole batch of 32, the reply, the mean. No evaluation. Networks and data are those of
workloads.py, and on mlp --check gives pfl's losses to 1e-6. A first round, which starts the actors, is run before
"ready".

The engine is that of `flwr run`, entered by `run_simulation` (deprecated in 1.41 in favour of that command), because
then the ServerApp is a thread of this process and can serve stdin. It looks for new messages every 0.1 s, which cannot
be set, and each look compares every client with every open message, up to 40,000 pairs on mlp.

--as-shipped takes the settings that Flower and Ray come with, as its users do. Otherwise the configuration is the
fastest found with flwr 1.41.0, ray 2.55.1 and torch 2.13.0 on 2 cores that other work shared:
a few rounds each, differences under 20 % are noise. Kept, with the cost of the alternative on mlp where no other is
named:
 - messages up to 4 MiB go with the call instead of through Ray's object store (Ray's limit of 100 kB: 2.8 times);
 - replies are collected every 0.01 s (Flower's 0.1 s: 1.2 to 1.5 times; 0.003 and 0.03 s: no gain);
 - Python threads change every 0.5 ms (Python's 5 ms: 1.2 to 1.3 times; 0.05 ms: no gain);
 - one actor of one thread per core (twice as many: 0.9 times on mlp, 1.1 on small_cnn, 0.7 on resnet20, but more
   processes also win more of a shared machine: try --workers again on a quiet one);
 - a model is sent as one vector (as 59 arrays: as long on resnet20, with 1.7 times the processor time on the server);
 - the network and all data stay in every actor; the SGD step is written out, as torch.optim imports much at the start.
No gain from: sending messages in waves of 20, 50 or 100 so that fewer are open; `start_simulation`, the older engine,
which has no such looks. Not tried: several clients behind one Flower node, as then Flower does not see the clients.
"""

import argparse
import functools
import json
import logging
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version

os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when they are imported

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from workloads import BATCH, CLIENTS_AND_SHAPE, RATE, draw

SETTINGS = ("workload", "models", "threads")  # what an actor must know, sent with every message

client_app = ClientApp()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", choices=CLIENTS_AND_SHAPE)
    parser.add_argument("--models", metavar="SRC", help="folder that holds fednormec/, for small_cnn and resnet20")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="actors (default: one per core)")
    parser.add_argument("--threads", type=int, default=1, help="torch intra-op threads an actor (default: 1)")
    parser.add_argument("--as-shipped", action="store_true", help="Flower's and Ray's own settings, none of ours")
    parser.add_argument("--check", action="store_true", help="print the loss before and after 20 rounds, and exit")
    args = parser.parse_args()
    if args.workload != "mlp" and not args.models:
        parser.error("this workload needs --models")
    args.models = os.path.abspath(args.models or "")  # an actor works in another folder
    return args


@functools.cache
def world(workload, models, threads):
    """The network, the one vector that its parameters are views of, and everyone's data: once in every process."""
    torch.set_num_threads(threads)
    network, images, labels = draw(workload, models)
    vector = nn.utils.parameters_to_vector(network.parameters()).detach()
    nn.utils.vector_to_parameters(vector, network.parameters())
    return network, vector, images, labels


def pack(vector):
    return ArrayRecord({"vector": Array(vector.numpy())})


def unpack(arrays, vector):
    vector.copy_(torch.from_numpy(arrays["vector"].numpy()))


@client_app.train()
def train(message, context):
    settings, client = message.content["config"], context.node_config["partition-id"]
    network, vector, images, labels = world(*(settings[name] for name in SETTINGS))
    unpack(message.content["arrays"], vector)
    parameters = list(network.parameters())
    loss = nn.functional.cross_entropy(network(images[client]), labels[client])
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=RATE)
    reply = {"arrays": pack(vector), "metrics": MetricRecord({"num-examples": BATCH})}
    return Message(RecordDict(reply), reply_to=message)


def build(args, grid):
    """Two functions: one runs a round and gives its seconds, the other gives the mean training loss."""
    clients, settings = CLIENTS_AND_SHAPE[args.workload][0], {name: getattr(args, name) for name in SETTINGS}
    network, vector, images, labels = world(**settings)
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_available_nodes=clients,
        train_metrics_aggr_fn=lambda replies, weight: MetricRecord({"clients": len(replies)}),
    )
    arrays = pack(vector)
    if not args.as_shipped:
        grid.pull_interval = 0.01
        sys.setswitchinterval(0.0005)  # the engine's threads share this process, and one of them rarely waits

    def run_round():
        nonlocal arrays
        start = time.perf_counter()
        result = strategy.start(grid, arrays, num_rounds=1, train_config=ConfigRecord(settings))
        seconds = time.perf_counter() - start
        metrics = result.train_metrics_clientapp.get(1, {"clients": 0})
        if metrics["clients"] != clients:
            raise RuntimeError(f"{metrics['clients']} of {clients} clients answered: see the errors above")
        arrays = result.arrays
        return seconds

    def mean_loss():
        unpack(arrays, vector)
        with torch.no_grad():
            pairs = zip(images, labels, strict=True)
            return sum(nn.functional.cross_entropy(network(x), y).item() for x, y in pairs) / clients

    return run_round, mean_loss


def main():
    args = parse()
    lines, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # Ray's processes need not hold the driver's pipe
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    logging.getLogger("flwr").setLevel(logging.ERROR)

    def say(**line):
        print(json.dumps(line), file=out, flush=True)

    server_app = ServerApp()

    @server_app.main()
    def serve(grid, context):
        run_round, mean_loss = build(args, grid)
        if args.check:
            before = mean_loss()
            for _ in range(20):
                run_round()
            say(loss_before=before, loss_after=mean_loss())
            return
        run_round()  # starts the actors
        versions = {name: version(name) for name in ("flwr", "ray", "torch", "numpy")}
        versions["python"] = platform.python_version()
        say(ready=True, versions=versions, threads=args.threads, workers=args.workers)
        for line in lines:
            say(seconds=[run_round() for _ in range(int(line))])

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder
        ray = {
            "num_cpus": args.workers,
            "object_store_memory": 2**28,
            "log_to_driver": False,
            "_node_ip_address": "127.0.0.2",  # loopback; 127.0.0.1 Ray replaces by the machine's address
            "_temp_dir": folder,
        }
        if not args.as_shipped:
            ray["_system_config"] = {"max_direct_call_object_size": 2**22}  # larger than any message here
        resources = {"init_args": ray}
        if not args.as_shipped:  # Flower gives a client two cores: here, one at a time
            resources["client_resources"] = {"num_cpus": 1, "num_gpus": 0.0}
        run_simulation(server_app, client_app, CLIENTS_AND_SHAPE[args.workload][0], backend_config=resources)


if __name__ == "__main__":
    import peer_flower  # by name, so that actors import `train` once instead of unpickling it with every message

    peer_flower.main()
