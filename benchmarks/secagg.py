"""Seconds and bytes of one attempt at a sum in secure aggregation, all clients in one process, one after another.

    make bench-secagg                            all sizes, a ring, a federation: half an hour; leave the machine alone
    python benchmarks/secagg.py [--clients 10,50,200] [--dims 25000,270000] [--repeat 3] [--ring] [--served] [--out F]
    python benchmarks/secagg.py --clients "" --served                    only the federation
    python benchmarks/secagg.py --quick          two small sizes, seconds; nothing is stored without --out

Each client has a random vector of so many words. Three kinds of attempts: nobody leaves; a tenth of the clients (at
least one) leave when their boxes are out, so that the server recovers their keys and takes their masks away; a tenth
leave when their masked vectors are out. Seconds are those of clients and server alone, without drawing vectors and the
roster's keys. Every sum is compared with the plain one, and the upload where nobody leaves with the formula.

--served: rounds of `federation serve` with ten `federation join`, all processes on this machine, under secagg and
under local trust.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from cryptography.hazmat.backends.openssl import backend
from cryptography.hazmat.primitives.asymmetric import ec
from federation import SEEDED, Federation, ended, free_port, named
from turns import HERE, machine

from fednormec.federation.messages import DONE, Request, StageReply, request_bytes, stage_bytes, stage_reply_bytes
from fednormec.secagg.aggregator import STAGES, Aggregator
from fednormec.secagg.layout import upload_bytes
from fednormec.secagg.member import Member
from fednormec.secagg.terms import Terms

PAGE, RESULTS = HERE.parent / "docs" / "performance.md", HERE / "results" / "secagg.json"
RING = (500, 25_000)  # clients, each with neighbours on a ring, and parameters
SERVED, TRUSTS = (10, 2_499, 60), ("secagg", "local")  # clients, inputs of a linear model with ten classes, rounds
FEDERATION = "federation"  # name of what was measured of one
LEAVES = {"nobody leaves": None, "a tenth, before masked": "masked", "a tenth, after masked": "agree"}
FLOOR, LEAVING = 0.7, 10  # least share of the clients in a sum; one of so many leaves
NEAR = 0.02  # by how much an upload may differ from the formula
FEWEST = 10_000  # parameters: with fewer, envelopes alone are more than that
NONCE = bytes(16)
Done = TypeVar("Done")


class Clock:
    """Seconds that each client, and the server, have taken at each stage."""

    def __init__(self, clients: int) -> None:
        self.clients = {stage: [0.0] * clients for stage in STAGES}
        self.server = dict.fromkeys(STAGES, 0.0)

    def client(self, stage: str, client: int, work: Callable[[], Done]) -> Done:
        begun = time.perf_counter()
        done = work()
        self.clients[stage][client] += time.perf_counter() - begun
        return done

    def serve(self, stage: str, work: Callable[[], Done]) -> Done:
        begun = time.perf_counter()
        done = work()
        self.server[stage] += time.perf_counter() - begun
        return done

    def seconds(self, stayed: Sequence[int]) -> dict[str, float]:
        """All that it has seen. `one client` is the mean over those that stayed: where clients work side by side, that
        is what one of them feels."""
        stages = {stage: sum(found) for stage, found in self.clients.items()}
        each = [sum(found[client] for found in self.clients.values()) for client in stayed]
        server = sum(self.server.values())
        return {
            "attempt": sum(stages.values()) + server,
            "server": server,
            "one client": statistics.mean(each),
            "slowest client": max(each),
            **{f"clients at {stage}": found for stage, found in stages.items()},
            **{f"server at {stage}": found for stage, found in self.server.items()},
        }


class Carried(NamedTuple):
    """Numbers of bytes that a client sends and gets at all stages, without and with the envelope of a federation.

    The enveloped download has the model, which comes with the first request.
    """

    upload: int = 0
    upload_enveloped: int = 0
    download: int = 0
    download_enveloped: int = 0

    def plus(self, asked: bytes, whole: bytes, answer: bytes) -> "Carried":
        enveloped = stage_reply_bytes(StageReply(NONCE, DONE, body=answer))
        more = (len(answer), len(enveloped), len(asked), len(whole))
        return Carried(*(have + add for have, add in zip(self, more, strict=True)))


def terms_of(private: Sequence[ec.EllipticCurvePrivateKey], width: int) -> Terms:
    roster = {client: key.public_key() for client, key in enumerate(private)}
    return Terms("benchmark", "all", 1, 1, roster, max(2, math.ceil(FLOOR * len(private) - 1e-9)), 0, width)


def attempt(clients: int, width: int, leaves: str | None, seed: int = 0) -> tuple[dict[str, float], Carried]:
    """Seconds of an attempt, and the bytes of a client that stays to its end.

    Args:
        clients: number of them.
        width: number of words in a vector.
        leaves: stage from which on one of ten is gone; None: nobody is.
        seed: seed of the vectors.
    """
    private = [ec.generate_private_key(ec.SECP256R1()) for _ in range(clients)]
    terms, clock, drawn = terms_of(private, width), Clock(clients), np.random.default_rng(seed)
    first = Request("benchmark", "all", 1, 0, True, NONCE, torch.zeros(width, dtype=torch.float32))
    gone = set(range(0, clients, LEAVING)) if leaves else set[int]()
    members = {i: clock.client("keys", i, partial(Member, terms, i, private[i])) for i in terms.cohort}
    server = clock.serve("keys", lambda: Aggregator(terms))
    carried, plain = dict.fromkeys(terms.cohort, Carried()), np.zeros(width, np.uint32)
    bodies: Any = dict.fromkeys(terms.cohort, b"")
    for stage in STAGES:
        sent = dict[int, bytes]()
        for i, body in bodies.items():
            if leaves and i in gone and STAGES.index(stage) >= STAGES.index(leaves):
                continue
            given: tuple[Any, ...] = () if stage == "keys" else (body,)
            if stage == "masked":
                vector = drawn.integers(0, 2**32, width, np.uint32)
                plain += vector
                given = (body, vector)
            sent[i] = clock.client(stage, i, partial(getattr(members[i], stage), *given))
            whole = request_bytes(first, stage, 1, terms.cohort) if stage == "keys" else stage_bytes(stage, NONCE, body)
            carried[i] = carried[i].plus(body, whole, sent[i])
        bodies = clock.serve(stage, partial(getattr(server, stage), sent))
    assert not server.refused, server.refused
    assert np.array_equal(bodies.words, plain), "the sum is not that of the vectors"
    stayed = [i for i in terms.cohort if i not in gone]
    return clock.seconds(stayed), carried[stayed[0]]


def measured(clients: int, width: int, repeat: int) -> dict[str, Any]:
    """Medians of several attempts of each kind, and the bytes of a client beside the formula and a plain message."""
    terms = terms_of([ec.generate_private_key(ec.SECP256R1()) for _ in range(clients)], width)
    near = terms.neighbourhood
    formula, found = upload_bytes(clients, near.neighbours, width), dict[str, Any]()
    for name, leaves in LEAVES.items():
        runs = [attempt(clients, width, leaves, seed) for seed in range(repeat)]
        seconds = {key: statistics.median(run[0][key] for run in runs) for key in runs[0][0]}
        carried = runs[0][1]
        if leaves is None:
            for bytes_ in (carried.upload, carried.upload_enveloped):
                assert abs(bytes_ - formula) <= NEAR * formula, (bytes_, formula)
        found[name] = {"seconds": seconds, "bytes": carried._asdict()}
        print(row(clients, width, name, seconds, carried), flush=True)
    return {
        "clients": clients,
        "parameters": width,
        "neighbours": near.neighbours,
        "shares_needed": near.shares_needed,
        "signatures_needed": terms.threshold,
        "floor": terms.floor,
        "repeats": repeat,
        "plain_bytes": 4 * width,
        "formula_bytes": formula,
        "versions": {name: version(name) for name in ("cryptography", "numpy")}
        | {"openssl": backend.openssl_version_text()},
        **found,
    }


def served(clients: int, inputs: int, rounds: int) -> dict[str, Any]:
    """Seconds of a round of a federation on loopback, under each trust, with all its processes on this machine."""
    found: dict[str, Any] = {"clients": clients, "parameters": 10 * (inputs + 1), "rounds": rounds}
    for trust in TRUSTS:
        with tempfile.TemporaryDirectory() as folder:
            where, privacy = f"localhost:{free_port()}", SEEDED | {"trust": trust}
            one = Federation(Path(folder), named(clients), inputs, rounds, where, 10, privacy)
            processes = [one.serve(), *map(one.join, one.names)]
            with ended(*processes):
                begun, last = one.until(3, 300), one.until(rounds - 1, 900)
                assert [process.wait(120) for process in processes] == [0] * len(processes)
            assert one.missed() == 0
        found[trust] = {"seconds_a_round": (last - begun) / (rounds - 4)}
        print(
            f"{clients} clients as processes, {trust} trust: {found[trust]['seconds_a_round']:.3f} s a round",
            flush=True,
        )
    return found


def row(clients: int, width: int, name: str, seconds: dict[str, float], carried: Carried) -> str:
    stages = "".join(f"{seconds[f'clients at {stage}']:>9.3f}" for stage in STAGES)
    over = 100 * (carried.upload_enveloped / (4 * width) - 1)
    whole, server, one = seconds["attempt"], seconds["server"], 1000 * seconds["one client"]
    return (
        f"{clients:>7}{width:>9}  {name:<24}{whole:>9.3f}{server:>9.3f}{one:>10.1f}{stages}"
        f"{carried.upload:>11,}{carried.upload_enveloped:>11,}{over:>+8.1f}{carried.download:>11,}"
    )


def head() -> str:
    stages = "".join(f"{stage:>9}" for stage in STAGES)
    sizes = f"{'upload':>11}{'enveloped':>11}{'% > 4d':>8}{'download':>11}"
    return f"{'clients':>7}{'d':>9}  {'seconds of':<24}{'attempt':>9}{'server':>9}{'client/ms':>10}{stages}{sizes}"


def keep(path: Path, command: Sequence[str], name: str, found: dict[str, Any]) -> None:
    """Adds what was measured now to a file; what was not is kept with its own date."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    now = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "command": list(command)}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(stored | {name: {**now, **found}}, indent=1) + "\n")


# the page


def table(stored: dict[str, Any]) -> str:
    """Returns the rows of docs/performance.md on secure aggregation."""
    head = ("clients", "d", "one attempt", "a tenth gone before masked", "… after masked", "server", "one client",
            "up, over 4d", "formula", "down, without the model")  # fmt: skip
    sizes = [found for name, found in stored.items() if name != FEDERATION]
    rows = [head, ["---"] * len(head), *map(cells, sizes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    everyone, before, after = (found[name]["seconds"] for name in LEAVES)
    up, down = (found["nobody leaves"]["bytes"][way] for way in ("upload_enveloped", "download"))
    whole = "" if found["neighbours"] == found["clients"] - 1 else f", {found['neighbours']} neighbours"
    return (
        f"{found['clients']}{whole}", f"{found['parameters']:,}",
        *(f"{kind['attempt']:.{2 if kind['attempt'] < 10 else 1}f} s" for kind in (everyone, before, after)),
        f"{everyone['server']:.2f} s", f"{1000 * everyone['one client']:.0f} ms",
        f"{up:,} bytes, +{100 * (up / found['plain_bytes'] - 1):.1f} %",
        f"{found['formula_bytes']:,} ({100 * (up / found['formula_bytes'] - 1):+.2f} %)", f"{down:,} bytes",
    )  # fmt: skip


def sentence(found: dict[str, Any]) -> str:
    """Returns what docs/performance.md says about a federation."""
    summed, local = (found[trust]["seconds_a_round"] for trust in TRUSTS)
    return (
        f"{found['clients']} clients × {found['parameters']:,}, all processes on this machine: {summed:.2f} s a round "
        f"under `secagg` trust, {local:.2f} s under `local` trust"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=numbers, default=[10, 50, 200])
    parser.add_argument("--dims", type=numbers, default=[25_000, 270_000], help=f"parameters, {FEWEST:,} or more")
    parser.add_argument("--repeat", type=int, default=3, help="attempts of each kind; medians are shown")
    parser.add_argument("--ring", action="store_true", help="also {} clients on a ring, d = {:,}".format(*RING))
    parser.add_argument("--served", action="store_true", help=f"also a federation of {SERVED[0]} clients")
    parser.add_argument("--out", type=Path, help=f"where results are stored: {RESULTS.relative_to(HERE.parent)}")
    parser.add_argument("--quick", action="store_true", help="two small sizes once, to see that it works")
    asked = parser.parse_args(words)
    if min(asked.clients, default=4) < 4 or min(asked.dims) < FEWEST or asked.repeat < 1:
        parser.error(f"it takes 4 clients, {FEWEST:,} parameters and one attempt, at least")
    sizes = [(clients, width) for clients in asked.clients for width in asked.dims]
    sizes += [RING] if asked.ring else []
    repeat, out = asked.repeat, asked.out or RESULTS
    if asked.quick:
        sizes, repeat, out = [(4, 25_000), (10, 25_000)], 1, asked.out
    command = sys.argv[1:] if words is None else words
    print(head(), flush=True)
    for clients, width in sizes:
        found = measured(clients, width, repeat)
        if out is not None:
            keep(out, command, f"{clients} clients, {width} parameters", found)
    if asked.served and not asked.quick:
        found = served(*SERVED)
        if out is not None:
            keep(out, command, FEDERATION, found)
    if out is not None:
        print(f"stored in {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
