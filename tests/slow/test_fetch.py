"""Two processes that want the same images at once."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from image_files import CIFAR, Server, serving

FETCH = """
import sys
from dataclasses import replace
from fednormec.data.fetching import Official, Remote, fetch
from fednormec.data.images import CIFAR10
images = replace(CIFAR10, train=int(sys.argv[1]), test=int(sys.argv[2]), sha256=sys.argv[3])
source = Official("the server", (Remote(*sys.argv[4:]),))
print(fetch(images, sources=[source], say=lambda line: print(line, flush=True)).source)
"""


def test_two_processes_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORMEC_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as serve:
        fetch_twice(serve())


def fetch_twice(server: Server) -> None:
    server.go_on.clear()
    remote = server.remote()
    arguments = [str(CIFAR.train), str(CIFAR.test), CIFAR.sha256, remote.url, remote.digest]
    command = [sys.executable, "-c", FETCH, *arguments]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.stdout for process in both if process.stdout is not None]
    waiting: list[str] = []
    threads = [threading.Thread(target=lambda pipe=pipe: waiting.append(pipe.readline())) for pipe in lines]
    for thread in threads:
        thread.start()
    while not waiting and any(process.poll() is None for process in both):
        threads[0].join(0.05)
    assert waiting == ["another process is fetching cifar10; waiting for it\n"]
    server.go_on.set()
    for process, thread in zip(both, threads, strict=True):
        thread.join()
        waiting.append(process.communicate()[0])
        assert process.returncode == 0
    said = sorted(line for text in waiting for line in text.splitlines())
    assert said == ["None", "another process is fetching cifar10; waiting for it", "the server"]
    assert server.asked == [None]
