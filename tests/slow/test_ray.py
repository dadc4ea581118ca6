"""The Ray engine: the same bits as in process whoever computes, checkpoints from one to the other, workers that die."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import sets
from example_runs import same as same_files
from example_runs import whole
from paths import PLAIN
from processes import command_line, until
from simulations import mlp_problem

import fednormec as fn
from fednormec.algorithms.faults import FAULTS
from fednormec.config.assemble import assemble
from fednormec.engine import memories
from fednormec.engine import ray_cluster as ray_engine
from fednormec.engine.ray_cluster import Ray
from fednormec.engine.round import Resumed, Round
from fednormec.errors import BoundBroken, Stopped, UserError, WorkerLost
from fednormec.runs import checkpoint as checkpoints
from fednormec.runs.runner import Site, go_on


@pytest.fixture(scope="module", autouse=True)
def own_token() -> Iterator[None]:
    """Ray would make one in the user's home; the clusters here have one of their own. It reads it when imported."""
    with pytest.MonkeyPatch.context() as patch:
        if "ray" not in sys.modules:
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """One for all tests here, with the CPUs of six workers; this process is connected to it."""
    with ray_engine._connected(Ray(workers=6), 6):
        import ray

        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def three(cluster: str) -> Iterator[list[Any]]:
    with ray_engine._started(3) as handles:
        yield handles


@pytest.fixture
def same_workers(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that several simulations use one after another, since each takes a second to start."""

    @contextmanager
    def started(count: int) -> Iterator[list[Any]]:
        yield three[:count]

    monkeypatch.setattr(ray_engine, "_started", started)


SMALL = ("model.name=linear", "data.clients=9", "run.rounds=12", "run.checkpoint_rounds=3", "problem.tile=2",
         "participation.idle=sleep")  # fmt: skip
SIZES = [8, 8, 3, 9, 8, 8, 2, 8, 8, 8, 5] * 2 + [8]
uneven_problem = partial(mlp_problem, sizes=SIZES, tile=2)


def history(*asked: Any, **settings: Any) -> list[tuple[Any, ...]]:
    """All that a round leaves, to be compared bit by bit."""
    return [
        (r.x.clone(), r.server.memory.clone(), r.memory.clone(), r.released.clone(), r.left_out, r.epsilon)
        for r in fn.simulate(*asked, rounds=4, seed=3, **settings)
    ]


def same(ones: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    pairs = [pair for one, other in zip(ones, others, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


SGD = fn.sgd(0.3, steps=3, batch_size=4)
FALLING = fn.schedule("linear", 4)
FAULTY = fn.faulty(SGD, FAULTS["not_a_number"], [1, 13, 22])
CASES = {
    "feedback, all advance": (fn.fed_normec(SGD), fn.poisson(0.5)),
    "feedback, idle sleep": (fn.fed_normec(SGD), fn.poisson(0.5, "sleep")),
    "feedback, few are drawn": (fn.fed_normec(fn.gd(0.3, 2)), fn.poisson(0.1, "sleep")),
    "everyone": (fn.fed_normec(fn.gd(0.3)), fn.full()),
    "momentum": (fn.clip21_sgd2m(batch_size=4), fn.poisson(0.5)),
    "averaging": (fn.dp_fed_avg_clip(SGD), fn.fixed_size(9)),
    "control variates": (fn.dp_scaffold(SGD), fn.poisson(0.5)),
    "residuals": (fn.ef14(SGD), fn.poisson(0.5)),
    "error control": (fn.econtrol(SGD), fn.poisson(0.5)),
    "centred, with deviations": (fn.centred(SGD, leak=0.1), fn.poisson(0.5)),
    "adaptive clip": (fn.dp_fed_avg_adaptive(SGD), fn.poisson(0.5)),
    "adaptive feedback": (fn.fed_normec_adaptive(FAULTY), fn.poisson(0.5)),
    "broken clients": (fn.fed_normec(FAULTY), fn.poisson(0.5)),
    "looking ahead, on schedules": (
        fn.fed_normec(SGD.scheduled(FALLING)).with_beta(FALLING).with_optimizer(fn.optimizers.disk(0.6)),
        fn.poisson(0.5),
    ),
    "adam, averaged": (
        fn.dp_fed_avg_clip(SGD).with_optimizer(fn.optimizers.ema(fn.optimizers.adam())),
        fn.poisson(0.5),
    ),
}
WITHOUT_NOISE = {
    "primed": (fn.fed_normec(SGD, initial_memory="local_updates", warmup_rounds=1), fn.poisson(0.5, "sleep")),
    "plain averaging": (fn.fed_avg(FAULTY), fn.full()),
    "scaffold": (fn.scaffold(SGD), fn.poisson(0.5)),
    "top-k": (fn.ef21(), fn.full()),
    "random coordinates": (fn.soteria(SGD, k=9), fn.poisson(0.5)),
    "personal models": (fn.mr_mtl(SGD, pull=0.5), fn.poisson(0.5)),
}


@pytest.mark.parametrize(
    ("case", "noise"), [*((case, 1.0) for case in CASES), *((case, None) for case in (*CASES, *WITHOUT_NOISE))]
)
def test_the_same_bits_whoever_computes(same_workers, case, noise):
    algorithm, participation = (CASES | WITHOUT_NOISE)[case]
    privacy = None if noise is None else fn.Privacy(noise_std=noise)
    asked = (uneven_problem(), algorithm, participation, privacy)
    expected = history(*asked)
    for workers in (1, 2, 3):
        assert same(expected, history(*asked, on=Ray(workers=workers)))


@pytest.mark.parametrize(
    "problem",
    [
        fn.random_quadratic(23, 5, parts=3, seed=0),
        fn.random_quadratic(300, 3, seed=0, dtype=torch.float32),
        fn.random_logistic(19, 3, examples=5),
        uneven_problem(dtype=torch.float64, tile=5),
        uneven_problem(vectorize="vmap"),
        uneven_problem(vectorize="loop"),
    ],
)
def test_the_same_bits_on_every_problem(same_workers, problem):
    for participation in (fn.poisson(0.4), fn.poisson(0.4, "sleep")):
        asked = (problem, fn.fed_normec(fn.ig(0.3, batch_size=2)), participation)
        assert same(history(*asked), history(*asked, on=Ray(workers=3)))


@pytest.mark.parametrize("unit", ["record", ("client", "record")])
@pytest.mark.parametrize(
    "problem",
    [
        fn.random_quadratic(7, 5, parts=6, seed=0),
        fn.random_logistic(9, 3, examples=12, regularizer=0.1),
        uneven_problem(dtype=torch.float64, tile=5),
        uneven_problem(vectorize="vmap"),
        uneven_problem(vectorize="loop"),
    ],
)
def test_the_same_bits_where_records_are_protected(same_workers, problem, unit):
    """Batches and noise are drawn by the client's number among all, wherever it computes."""
    steps, both = fn.dp_sgd(0.3, steps=3, rate=0.4, tau=0.5), unit != "record"
    algorithm = fn.dp_fed_avg_clip(steps) if both else fn.scaffold(steps)
    privacy = fn.Privacy(noise_std=1.0, unit=unit, record_noise_std=2.0 if both else None)
    asked = (problem, algorithm, fn.full(), privacy)
    assert same(history(*asked), history(*asked, on=Ray(workers=3)))


def test_the_same_bits_with_adapters(same_workers):
    import ray

    pytest.importorskip("peft", reason="LoRA needs the package peft")
    transformers = pytest.importorskip("transformers", reason="it is tried on a model of transformers")
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, return_dict=False,
    )  # fmt: skip
    torch.manual_seed(0)
    body, rng = transformers.GPT2Model(config), np.random.default_rng(0)
    module = fn.lora(torch.nn.Sequential(body, Last(), torch.nn.Linear(8, 3)), 2, ["c_attn", "2"])
    clients = [(rng.integers(0, 9, (4, 5)), rng.integers(0, 3, 4)) for _ in range(7)]
    ray.cloudpickle.register_pickle_by_value(sys.modules[Last.__module__])
    asked = (fn.NeuralProblem(module, clients, tile=2), fn.fed_normec(SGD), fn.poisson(0.5))
    assert same(history(*asked), history(*asked, on=Ray(workers=2)))


class Last(torch.nn.Module):
    """The last token's features, of what a model of transformers returns."""

    def forward(self, outputs: Any) -> torch.Tensor:
        return outputs[0][:, -1]


class Undivided:
    """A problem of the user's own, that nobody taught to be taken apart."""

    def __init__(self, problem: Any) -> None:
        for name in ("dim", "num_clients", "tile", "client_sizes", "init", "grad", "evaluate", "named", "model"):
            setattr(self, name, getattr(problem, name))


def test_a_worker_measures_what_it_adds(same_workers):
    base = fn.dp_fed_avg_clip(fn.gd(0.1))

    def client_(server, rows, updates):
        return base.client_(server, rows, updates) if server.round < 4 else fn.Messages(updates.fill_(1.0))

    late, seen = base._replace(client_=client_), []
    with pytest.raises(BoundBroken, match=r"DP-FedAvg \(clip\) sent a message of length"):
        for r in fn.simulate(
            uneven_problem(), late, privacy=fn.Privacy(noise_std=1.0), rounds=6, on=Ray(workers=2)
        ):  # fmt: skip
            seen.append(r.number)
    assert seen == [1, 2, 3, 4]


def test_a_problem_that_cannot_be_taken_apart_goes_as_a_whole(same_workers):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[Undivided.__module__])
    asked = (Undivided(uneven_problem()), fn.fed_normec(SGD), fn.poisson(0.5))
    assert same(history(*asked), history(*asked, on=Ray(workers=2)))


def test_training_on_ray_is_training_here(same_workers):
    asked = (uneven_problem(), fn.fed_normec(SGD), fn.poisson(0.5), fn.Privacy(epsilon=9, delta=1e-3))
    here, there = (fn.train(*asked, rounds=6, seed=1, workers=2, on=on) for on in (None, Ray()))
    assert torch.equal(here.x, there.x)
    assert here.history == there.history
    assert here.statement.text == there.statement.text


OWN_NET = """
import torch
from parts import layer
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body, self.head = layer(inputs, 5), layer(5, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


def build(input_shape, outputs):
    return Net(torch.Size(input_shape).numel(), outputs)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
"""


def test_code_of_the_users_own_goes_to_workers_that_cannot_import_it(same_workers, tmp_path):
    (tmp_path / "net.py").write_text(OWN_NET)
    (tmp_path / "parts.py").write_text("from torch import nn\n\n\ndef layer(a, b):\n    return nn.Linear(a, b)\n")
    asked = {
        "data": {"clients": 6, "examples": 80}, "model": {"name": "net.py:build"}, "problem": {"loss": "net.py:loss"},
        "local": {"step": 0.5}, "method": {"name": "fed_avg"},
    }  # fmt: skip
    made = assemble(asked, folder=tmp_path)
    here, there = (
        [r.x for r in fn.simulate(made.problem, made.algorithm, rounds=3, on=place)]
        for place in (fn.Threads(1), Ray(workers=2))
    )
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_what_cannot_be_sent_to_a_worker_is_said_in_a_sentence(same_workers):
    lock = threading.Lock()
    stuck = fn.fed_normec(SGD._replace(run=lambda *args: lock))
    with pytest.raises(UserError, match="the problem or the method cannot be sent to a worker: .*lock"):
        next(fn.simulate(mlp_problem(), stuck, rounds=1, on=Ray(workers=2)))


def test_who_takes_part_is_no_business_of_the_workers(same_workers):
    lock = threading.Lock()
    rule = fn.poisson(0.5)._replace(rate=lambda m: 0.5 if lock else 1.0)
    asked = (mlp_problem(), fn.fed_normec(SGD), rule)
    assert same(history(*asked), history(*asked, on=Ray(workers=2)))


# checkpoints


def test_checkpoints_go_from_one_engine_to_the_other(same_workers, tmp_path, monkeypatch):
    monkeypatch.setattr(memories, "BLOCK", 1000)  # several blocks for each worker
    asked = (uneven_problem(), fn.fed_normec(SGD), fn.poisson(0.5, "sleep"), fn.Privacy(noise_std=1.0))
    expected = history(*asked)
    for on in (None, Ray(workers=1), Ray(workers=3)):
        path = tmp_path / f"{on and on.workers}"
        for r in fn.simulate(*asked, rounds=4, seed=3, on=on):
            if r.number == 2:
                checkpoints.save(path, r)
                break
        for then in (None, Ray(workers=2), Ray(workers=3)):
            rest = history(*asked, on=then, resume=Resumed(checkpoints.load(path)))
            assert same(expected[2:], rest)
    assert len({(tmp_path / name).read_bytes() for name in ("None", "1", "3")}) == 1


def test_a_checkpoint_needs_one_block_at_a_time(same_workers, tmp_path, monkeypatch):
    monkeypatch.setattr(memories, "BLOCK", 1000)
    for r in fn.simulate(uneven_problem(), fn.fed_normec(SGD), rounds=1, on=Ray(workers=2)):
        sizes = [block.numel() * 4 for block in r.memories.blocks()]
        assert max(sizes) <= 1000
        assert sum(sizes) == 4 * 23 * r.x.numel()
        assert r.memories.shape == tuple(r.memory.shape)
    with pytest.raises(UserError, match="ended with the simulation"):
        _ = r.memory


@pytest.mark.parametrize("begun", [None, Ray()])
def test_a_run_folder_is_resumed_by_either_engine(same_workers, tmp_path, begun):
    asked = (*SMALL, "privacy.noise_std=2", "run.keep_checkpoint=true")
    whole(tmp_path / "whole", *asked)
    after = iter(range(1, 99))
    with pytest.raises(Stopped, match="after round 7"):
        whole(tmp_path / "out", *asked, site=Site(on=begun), workers=2, stop=lambda: next(after) >= 7)
    go_on(tmp_path / "out", quiet=True, site=Site(on=Ray() if begun is None else None), workers=3)
    assert same_files(tmp_path / "whole", tmp_path / "out")
    kept = [next(folder.glob("checkpoint-12*")) for folder in (tmp_path / "whole", tmp_path / "out")]
    assert len({checkpoints.load(path).facts.round for path in kept}) == 1


def test_the_theorys_figures_see_memories_that_lie_elsewhere(same_workers, tmp_path):
    asked = ("problem.name=quadratic", "run.rounds=4", "run.dtype=float64", "run.keep_checkpoint=true")
    summaries = [whole(tmp_path / f"{on}", *asked, site=Site(on=on), workers=2) for on in (None, Ray())]
    assert same_files(tmp_path / "None", tmp_path / f"{Ray()}")
    assert summaries[0]["guarantee"] == summaries[1]["guarantee"]


def test_a_profile_names_the_engine_and_sees_what_workers_do(same_workers, tmp_path):
    profile = whole(tmp_path / "out", *SMALL, site=Site(on=Ray()), workers=2, profile=True)["profile"]
    assert (profile["choices"]["engine"], profile["choices"]["workers"]) == ("ray", 2)
    assert profile["stages"]["gradients"] > 0


# workers that die


def workers_of(process: int) -> list[int]:
    """Worker processes of the cluster that a process started, and of no other one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    raylets = [pid for pid, parent in parents.items() if parent == process]
    found = [pid for pid, parent in parents.items() if parent in raylets]
    return [pid for pid in found if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Worker")]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the process to kill in /proc")
def test_a_run_whose_worker_was_killed_goes_on_to_the_same_bits(cluster, tmp_path, capfd):
    asked = (*SMALL, "privacy.noise_std=2")
    whole(tmp_path / "whole", *asked)
    before = set(workers_of(os.getpid()))

    def kill_in_round_5(r: Round, record: fn.Record) -> None:
        if r.number == 5:
            os.kill((set(workers_of(os.getpid())) - before).pop(), signal.SIGKILL)

    with pytest.raises(UserError, match="a worker died, .* To go on: fednormec run --resume ") as told:
        whole(tmp_path / "out", *asked, site=Site(on=Ray()), workers=1, observers=[fn.Observer(kill_in_round_5)])
    assert len(str(told.value).splitlines()) == 1
    assert [path.name for path in checkpoints.newest_first(tmp_path / "out")] == ["checkpoint-3.safetensors"]
    go_on(tmp_path / "out", quiet=True, site=Site(on=Ray()), workers=1)
    assert same_files(tmp_path / "whole", tmp_path / "out")
    said = capfd.readouterr()
    assert said.out == ""
    assert all(line.startswith("note: ") for line in said.err.splitlines())


def test_what_goes_wrong_in_a_worker_is_told_as_anywhere(same_workers):
    def short(problem: Any, x: Any, ids: Any, moment: Any, correction: Any) -> Any:
        return SGD.run(problem, x, ids, moment, correction)[:, :-1]

    short.__module__ = "__main__"  # sent by value
    with pytest.raises(UserError, match="gave updates of shape") as told:
        next(fn.simulate(uneven_problem(), fn.fed_normec(SGD._replace(run=short)), rounds=1, on=Ray(workers=2)))
    assert not isinstance(told.value, WorkerLost)


# mistakes, and other ways to use it


def test_more_workers_than_clients_are_as_many_as_have_work(same_workers):
    problem = fn.random_quadratic(2, 3, seed=0)
    asked = (problem, fn.fed_normec(fn.gd(0.1)))
    assert same(history(*asked), history(*asked, on=Ray(workers=50)))


def test_more_workers_than_cpus_are_refused(cluster):
    with pytest.raises(UserError, match="the Ray cluster has 6 CPUs, one for each worker: ask for at most 6"):
        next(fn.simulate(uneven_problem(), fn.fed_normec(SGD), rounds=1, on=Ray(workers=7)))


def test_a_cluster_that_does_not_start_is_told():
    """As when its disk is full; in a process of its own, which is connected to nothing."""
    code = (
        "import ray, fednormec as fn\n"
        "def broken(**settings): raise RuntimeError('Failed to start GCS.\\nLast 0 lines of error files')\n"
        "ray.init = broken\n"
        "try: next(fn.simulate(fn.random_quadratic(3, 2), fn.fed_normec(fn.gd(0.1)), rounds=1, on=fn.Ray()))\n"
        "except fn.UserError as told: print(told)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "Ray did not start: Failed to start GCS.\n"


def test_a_second_connection_is_refused(cluster):
    with pytest.raises(UserError, match="connected to Ray already"):
        next(fn.simulate(uneven_problem(), fn.fed_normec(SGD), rounds=1, on=Ray(cluster)))


def test_the_command_on_a_cluster_that_runs_leaves_it_running(cluster, tmp_path):
    import ray

    done = subprocess.run(
        command_line("run", PLAIN, "--engine", "ray", "--address", cluster, "--workers", 2, "--json", *sets(*SMALL),
                "--out", tmp_path / "out"), capture_output=True, text=True, timeout=60,
        env=os.environ | ray_engine.ONLY_THIS_MACHINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    whole(tmp_path / "whole", *SMALL)
    assert same_files(tmp_path / "whole", tmp_path / "out")
    assert ray.cluster_resources()["CPU"] == 6


def test_a_wrong_token_is_told(cluster, monkeypatch):
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in (ray_engine.ONLY_THIS_MACHINE | wrong).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray_engine, "ANSWERS_WITHIN", 6.0)
    with pytest.raises(UserError, match="asks for a token and got none, or another one"):
        ray_engine._require_answer(cluster)


def test_something_that_is_not_ray_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ray_engine, "ANSWERS_WITHIN", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        ray_engine._require_listener(address)
        with pytest.raises(UserError, match=f"no Ray cluster answers at {address}"):
            ray_engine._require_answer(address)


def test_ctrl_c_stops_a_run_on_a_cluster_of_its_own_and_ends_that_too(tmp_path):
    """All processes of the terminal hear Ctrl-C; the run finishes its round and nothing stays behind."""
    longer = sets(*SMALL, "run.rounds=100000", "run.evaluate_every=100000")
    arguments = command_line(
        "run", PLAIN, "--engine", "ray", "--workers", 2, "--quiet", *longer, "--out", tmp_path / "out"
    )
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3))
    assert process.poll() is None
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "stopping after this round" in err
    assert "To go on: fednormec run --resume" in err.splitlines()[-1]
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert checkpoints.newest_first(tmp_path / "out")


def test_ray_is_imported_by_nobody_else():
    code = (
        "import sys, fednormec as fn\n"
        "fn.train(fn.random_quadratic(3, 2), fn.fed_normec(fn.gd(0.1)), rounds=1)\n"
        "assert fn.Ray() and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_round_knows_whether_it_is_the_last(same_workers):
    rounds: list[Round] = list(fn.simulate(uneven_problem(), fn.fed_normec(SGD), rounds=3, on=Ray(workers=2)))
    assert [r.last for r in rounds] == [False, False, True]
