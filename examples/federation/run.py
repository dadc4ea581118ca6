"""A server and three clients on this machine, as four processes, with TLS and keys, each client with a data file of its
own, made from scikit-learn's digits:

    python examples/federation/run.py              (no noise; needs: pip install 'fednormec[federation]')
    python examples/federation/run.py --private    (each client adds its own noise, for ε = 8)
"""

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

HERE = Path(__file__).parent
NAMES = ("north", "south", "east")
PRIVATE = '\n[privacy]\nepsilon = 8.0\ntrust = "local"\nrandomness = "secure"\n'


def fednormec(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fednormec", "federation", *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE)


def make_data(folder: Path) -> None:
    """A fifth of the digits is a public test set; the clients have all digits, but some of them far more often."""
    images, labels = load_digits(return_X_y=True)
    images, order = (images / 16).astype(np.float32), np.random.default_rng(0).permutation(len(labels))
    test, rest = order[:360], order[360:]
    owner = np.where(np.random.default_rng(1).random(len(rest)) < 0.6, labels[rest] % 3, rest % 3)
    np.savez(folder / "test.npz", x=images[test], y=labels[test])
    for client, name in enumerate(NAMES):
        mine = rest[owner == client]
        np.savez(folder / f"{name}.npz", x=images[mine], y=labels[mine])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(folder: Path, private: bool = False, rounds: int | None = None) -> str:
    """What the server says at the end."""
    make_data(folder)
    text = (HERE / "federation.toml").read_text(encoding="utf-8") + (PRIVATE if private else "")
    if rounds is not None:
        text = text.replace("rounds = 40", f"rounds = {rounds}")
    (folder / "asked.toml").write_text(text, encoding="utf-8")
    fed, agreed = str(folder / "fed"), () if private else ("--not-private",)
    made = fednormec(
        "init", fed, str(folder / "asked.toml"), "--clients", ",".join(NAMES), "--inputs", "64", "--classes", "10",
        "--address", f"localhost:{free_port()}",
    )  # fmt: skip
    if made.wait():
        sys.exit(made.returncode)
    server = fednormec("serve", fed, *agreed)
    clients = [
        fednormec("join", f"{fed}/clients/{name}", "--data", str(folder / f"{name}.npz"), *agreed) for name in NAMES
    ]
    try:
        said, _ = server.communicate()
        codes = [client.wait(timeout=30) for client in clients]
    finally:
        for process in (server, *clients):
            process.kill()
    if server.returncode or any(codes):
        sys.exit("something went wrong")
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--private", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_for_it:
        print(main(Path(made_for_it), asked.private))
