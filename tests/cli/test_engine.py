"""Where clients compute, on the command line: what cannot be is said, and nothing is started for it."""

import pytest
from command import Command, sentence, sets
from paths import PLAIN

from fednormec.engine import ray_cluster as ray_engine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "rayy"), "unknown engine 'rayy'; did you mean 'ray'?"),
        (("--engine", "ray", "--workers", 0), "--workers must be at least 1, not 0."),
        (("--workers", -1), "--workers must be at least 1, not -1."),
        (("--address", "127.0.0.1:6379"), "--address is that of a Ray cluster: add --engine ray, or leave it out."),
        (("--engine", "ray", "--address", "nonsense"), "the address of a Ray cluster is that of its head"),
        (("--engine", "ray", "--address", "127.0.0.1:99999"), "the address of a Ray cluster is that of its head"),
        (("--engine", "ray", "--address", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1: "),
        (("--engine", "ray", *sets("run.memories=file")), "with Ray the memories lie in the workers' own memory"),
    ],
)
def test_a_mistake_gets_a_sentence_and_nothing_is_started_or_written(
    fednormec_: Command, tmp_path, monkeypatch, arguments, said
):
    for way in ("subprocess", "_connected"):  # to a cluster: asked first whether it answers, then connected to
        monkeypatch.setattr(ray_engine, way, None)
    done = fednormec_("run", PLAIN, *arguments)
    assert done.code == 2
    assert said in sentence(done.err)
    assert not list(tmp_path.iterdir())


def test_without_ray_a_sentence_says_what_to_install(fednormec_: Command, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    done = fednormec_("run", PLAIN, "--engine", "ray")
    assert done.code == 2
    assert sentence(done.err) == "computing on Ray needs Ray: pip install 'fednormec[ray]'."
    assert not list(tmp_path.iterdir())
