"""File locks, and systems without them (Windows): what needs none works there, what needs one says so and writes
nothing. That is played in processes in which the modules and functions that Windows lacks cannot be had."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command import sentence

from fednormec import files
from fednormec.errors import UserError
from fednormec.federation.joining import Joining, join
from fednormec.federation.sessions import Serving, serve
from fednormec.files import NO_LOCKS, Lines, Lock, sync_folder

ABSENT = """
import mmap, os, signal, sys

class Finder:
    names = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not Finder.names & set(sys.modules)
sys.meta_path.insert(0, Finder())
import asyncio  # whose POSIX part asks for os.sysconf

for module, names in (
    (os, ("fork", "geteuid", "getuid", "killpg", "posix_fallocate", "sched_getaffinity", "statvfs", "sysconf")),
    (signal, ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "pthread_sigmask", "setitimer")),
    (mmap, ("MADV_DONTNEED",)),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
COMMAND = "from fednormec.cli.main import main; main()"
COMMANDS = """
from fednormec.cli.main import main

for arguments in sys.argv[1:]:
    sys.argv = ["fednormec", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        print("exit code", end.code, flush=True)
"""
IMPORT_ALL = """
import importlib, pkgutil
import fednormec as fn

found = [module.name for module in pkgutil.walk_packages(fn.__path__, "fednormec.")]
for name in found:
    if name not in ("fednormec.__main__", "fednormec.core._kernels"):
        importlib.import_module(name)
for name in fn.__all__:
    getattr(fn, name)
print(len(found))
"""
TRAIN = """
import fednormec as fn
from pathlib import Path

problem = fn.random_quadratic(6, 3, seed=1)
method = fn.fed_normec(fn.gd(step=0.1, steps=2), beta=0.1, server_step=0.1)
for on in (fn.Threads(workers=2), fn.Threads(memories_in=Path())):
    trained = fn.train(problem, method, fn.poisson(0.5), fn.Privacy(epsilon=8, delta=1e-5), rounds=3, seed=1, on=on)
    print(trained.x.tolist(), trained.statement.text)
"""
WORKS = ("--help", "privacy --clients 20 --p 0.25 --rounds 9 --epsilon 4", "methods", "data list",
         "config --not-private")  # fmt: skip
NEEDS_A_LOCK = ("sweep --over run.seed=[1,2]", "data fetch cifar10", "run --out out --not-private", "run --resume run")


def played(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FEDNORMEC_DATA": str(folder / "data"), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=120)


def test_every_module_can_be_imported_and_training_in_python_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = played(tmp_path, ABSENT + IMPORT_ALL + TRAIN)
    assert (there.returncode, there.stderr) == (0, "")
    modules, _, trained = there.stdout.partition("\n")
    monkeypatch.chdir(tmp_path)
    exec(TRAIN, {})
    here, _ = capsys.readouterr()
    assert int(modules) > 100 and "ε ≤ 8.00" in here and trained == here


def test_commands_that_need_no_lock_work(tmp_path: Path) -> None:
    done = played(tmp_path, ABSENT + COMMANDS, *WORKS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("exit code 0\n") == done.stdout.count("exit code") == len(WORKS)


def test_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = played(tmp_path, ABSENT + COMMAND, "run", "--not-private")
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence(done.stderr) == NO_LOCKS
    assert NO_LOCKS.startswith("run folders, ") and "not supported" in NO_LOCKS and "Linux, macOS or WSL" in NO_LOCKS
    assert not list(tmp_path.iterdir())


def test_whatever_needs_a_lock_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / "run" / name).touch()
    done = played(tmp_path, ABSENT + COMMANDS, *NEEDS_A_LOCK)
    assert done.stdout == "exit code 2\n" * len(NEEDS_A_LOCK)
    assert done.stderr == f"fednormec: {NO_LOCKS}\n" * len(NEEDS_A_LOCK)
    assert len(list(tmp_path.rglob("*"))) == 3


def test_files_that_lock_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for make in (lambda: Lines(tmp_path / "lines", new=True), lambda: Lock(tmp_path / "folder" / "lock")):
        with pytest.raises(UserError, match="Linux, macOS or WSL"):
            make()
    for take_part in (
        lambda: serve(tmp_path, Serving(), lambda: False),
        lambda: join(tmp_path, Joining("data"), lambda: False),
    ):
        with pytest.raises(UserError, match="Linux, macOS or WSL"):
            take_part()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_opened_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("os.open", refuse)
        with pytest.raises(PermissionError):
            sync_folder(tmp_path)
        patch.setattr("os.name", "nt")
        sync_folder(tmp_path)


# where there are locks


def test_locks_have_one_home() -> None:
    sources = Path(files.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "fcntl" in path.read_text(encoding="utf-8")] == ["files.py"]


def test_one_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with Lock(path) as second:
        with Lock(path) as first:
            assert first.take() and not second.take()
            waiting = threading.Thread(target=second.take, args=[True], daemon=True)
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        waiting.join(10)
        assert not waiting.is_alive()
        with Lock(path) as third:
            assert not third.take()


def test_a_file_system_without_locks_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with Lock(tmp_path / "lock") as lock:
        assert lock.take()
    Lines(tmp_path / "lines", new=True).close()
