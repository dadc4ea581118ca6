"""Files of any content: a sentence or a result, never a traceback, never a run written over.

    python tests/slow/fuzz.py FOLDER KIND [COUNT] [SEED]

KIND is config, data or run (a stopped run's config, metrics, ledger, environment and checkpoints, some with checksums
made right again). Every input is a real file with a few bytes, lines or facts changed, given to what `fednormec run`
and `fednormec run --resume` call. Prints a JSON line: how many were tried, refused, taken; the seed of any that ended
otherwise, to be tried again alone.
"""

import contextlib
import hashlib
import io
import json
import random
import shutil
import signal
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fednormec.config.schema import dump, read
from fednormec.config.settings import QUICKSTART
from fednormec.errors import Stopped, UserError
from fednormec.runs.runner import go_on, perform

SECONDS = 20  # of one input; what takes longer is asked for more than a moment's work, and is no mistake
TOKENS = [b"=", b"[", b"]", b'"', b"\n", b".", b"-", b"0", b"1e400", b"nan", b"-inf", b"{", b"}", b"null", b"99999999",
          b"true", b"\x00", b"\xff", b"\xed\xa0\x80", b"'", b"#", b"\\", b"[run]\n", b"rounds"]  # fmt: skip
RUN = {
    "problem": {"name": "quadratic", "clients": 5, "dim": 4},
    "method": {"name": "clip21_sgd2m"},
    "participation": {"name": "poisson", "p": 0.6},
    "privacy": {"noise_std": 2.0},
    "run": {"rounds": 6, "evaluate_every": 2, "checkpoint_rounds": 2},
}


class TooLong(Exception):
    pass


def changed(content: bytes, rng: random.Random) -> bytes:
    """With a few bytes put in, written over, taken out or turned; lines dropped, doubled or exchanged; or cut off."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at, piece = rng.randrange(len(content) + 1), rng.choice([rng.choice(TOKENS), rng.randbytes(rng.randint(1, 4))])
        head, tail, lines = content[:at], content[at:], content.split(b"\n")
        kind = rng.choice(["insert", "replace", "delete", "flip", "cut", "drop", "double", "swap"])
        if kind == "insert":
            content = head + piece + tail
        elif kind == "replace":
            content = head + piece + tail[len(piece) :]
        elif kind == "delete":
            content = head + tail[rng.randint(1, 9) :]
        elif kind == "flip" and tail:
            content = head + bytes([tail[0] ^ 1 << rng.randrange(8)]) + tail[1:]
        elif kind == "cut":
            content = head
        else:
            one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
            if kind == "drop":
                del lines[one]
            elif kind == "double":
                lines.insert(two, lines[one])
            else:
                lines[one], lines[two] = lines[two], lines[one]
            content = b"\n".join(lines)
    return content


# the three kinds: each gives a function from a random generator to whether the input was taken


def of_config(folder: Path) -> Callable[[random.Random], bool]:
    """A config, for a new run in a folder that holds one, and in one that does not."""
    sources = [QUICKSTART.read_bytes(), dump(RUN).encode()]
    perform(RUN, "fuzz", folder / "taken", quiet=True)

    def attempt(rng: random.Random) -> bool:
        path, out = folder / "fuzz.toml", folder / rng.choice(["taken", "new"])
        path.write_bytes(changed(rng.choice(sources), rng))
        shutil.rmtree(folder / "new", ignore_errors=True)
        with contextlib.suppress(Stopped):
            perform(read(path), "fuzz", out, quiet=True, stop=lambda: True)
        return True

    return attempt


def of_data(folder: Path) -> Callable[[random.Random], bool]:
    """An .npz file: its bytes, or the bytes of an array in it, with the archive's own checksum right."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((12, 3)), "y": np.arange(12) % 2, "client": np.arange(12) % 4,
              "x_test": rng.standard_normal((4, 3)), "y_test": np.arange(4) % 2}  # fmt: skip
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    members = {}
    with zipfile.ZipFile(whole) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    asked = read(QUICKSTART, [f"data.source={folder / 'fuzz.npz'}", "run.rounds=1", "model.name=linear"])
    asked["data"] = {"source": asked["data"]["source"]}

    def attempt(rng: random.Random) -> bool:
        if rng.random() < 0.3:
            content = changed(whole.getvalue(), rng)
        else:
            spoilt, made = rng.choice(list(members)), io.BytesIO()
            with zipfile.ZipFile(made, "w") as packed:
                for name, member in members.items():
                    packed.writestr(name, changed(member, rng) if name == spoilt else member)
            content = made.getvalue()
        (folder / "fuzz.npz").write_bytes(content)
        shutil.rmtree(folder / "new", ignore_errors=True)
        perform(asked, "fuzz", folder / "new", quiet=True)
        return True

    return attempt


def of_run(folder: Path) -> Callable[[random.Random], bool]:
    """A file of a run that was stopped after five rounds, to go on with. Damage of a checkpoint must not show."""
    perform(RUN, "fuzz", folder / "whole", quiet=True)
    rounds = iter(range(1, 9))
    with contextlib.suppress(Stopped):
        perform(RUN, "fuzz", folder / "stopped", quiet=True, stop=lambda: next(rounds) == 5)
    names = sorted(path.name for path in (folder / "stopped").iterdir())
    assert [name for name in names if name.startswith("checkpoint")] == [
        "checkpoint-4.safetensors", "checkpoint-5.safetensors",
    ]  # fmt: skip

    def attempt(rng: random.Random) -> bool:
        out, name = folder / "new", rng.choice([*names, "checkpoint-5.safetensors", "checkpoint-5.safetensors"])
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "stopped", out)
        content, checked = changed((out / name).read_bytes(), rng), name.startswith("checkpoint") and rng.random() < 0.7
        (out / name).write_bytes(with_right_checksum(content) if checked else content)
        before = (out / "ledger.jsonl").read_bytes()
        go_on(out, quiet=True)
        assert (out / "ledger.jsonl").read_bytes().startswith(before), "a ledger only grows"
        if name.startswith("checkpoint") and not checked:
            for file in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
                assert (out / file).read_bytes() == (folder / "whole" / file).read_bytes(), "damage shows"
        return True

    return attempt


def with_right_checksum(content: bytes) -> bytes:
    """As somebody would write it who wants a false checkpoint believed."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(header)["__metadata__"]["sha256"]
        blank = header.replace(f'"{said}"'.encode(), f'"{"0" * 64}"'.encode())
        right = hashlib.sha256(content[:8] + blank + content[8 + length :]).hexdigest()
        return content[:8] + blank.replace(b'"' + b"0" * 64 + b'"', f'"{right}"'.encode()) + content[8 + length :]
    return content


KINDS = {"config": of_config, "data": of_data, "run": of_run}


def fuzz(folder: Path, kind: str, count: int, seed: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    attempt = KINDS[kind](folder)
    taken = {path.name: path.read_bytes() for path in (folder / "taken").glob("*")}
    done: dict[str, Any] = {"kind": kind, "tried": 0, "refused": 0, "taken": 0, "too_long": 0, "wrong": []}
    for number in range(seed, seed + count):
        done["tried"] += 1
        signal.alarm(SECONDS)
        try:
            attempt(random.Random(f"{kind} {number}"))
            done["taken"] += 1
        except UserError as error:
            assert str(error).strip()
            done["refused"] += 1
        except TooLong:
            done["too_long"] += 1
        except BaseException:
            done["wrong"].append([number, traceback.format_exc()])
        finally:
            signal.alarm(0)
    if {path.name: path.read_bytes() for path in (folder / "taken").glob("*")} != taken:
        done["wrong"].append([-1, "a run was written over"])
    return done


def too_long(number: int, frame: Any) -> None:
    raise TooLong


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_long)
    warnings.simplefilter("ignore")
    sys.stderr = io.StringIO()
    where, what, *rest = sys.argv[1:]
    result = fuzz(Path(where), what, *map(int, [*rest, *["1000", "0"][len(rest) :]]))
    print(json.dumps(result))
    sys.exit(1 if result["wrong"] else 0)
