"""Records in a federation: each client draws, adds noise, counts and refuses by itself, whatever the server asks."""

import json
import math

import numpy as np
import pytest
import torch
from federated import CLASSES, FEATURES, NAMES, ROUNDS, Network, config, data, in_process, party, request_for

from fednormec.data import Examples
from fednormec.errors import UserError
from fednormec.federation.agreement import Federation, for_client, for_server
from fednormec.federation.client import answering, record_releases_of, releases_of
from fednormec.federation.disclosure import promise
from fednormec.federation.messages import DONE, REFUSED, Reply
from fednormec.privacy import accounting
from fednormec.privacy.accounting import Hidden

STEPS, BATCH = 3, 4
LOCAL = {"name": "dp_sgd", "step": 0.5, "steps": STEPS, "batch_size": BATCH, "tau": 1.0}
SECURE = {"unit": "record", "epsilon": 3.0, "delta": 1e-3, "randomness": "secure"}


def asked(seed: int = 3, rounds: int = ROUNDS, **privacy: object):
    run = {"rounds": rounds, "seed": seed, "dtype": "float64"}
    return config(privacy=SECURE | privacy, local=LOCAL, run=run, participation={"name": "full"})


def agreement(seed: int = 3, client: int = 0, **privacy: object) -> Federation:
    return party(asked(seed, **privacy), client)


def client(federation: Federation, folder, budget: float | None = None):
    """Asks the client for a new round each time; `x` and `base` say which."""
    network = Network.__new__(Network)
    network.run, network.server = f"a{federation.experiment.run.seed}", federation
    answer = answering(federation, 0, folder, budget=budget)

    def ask(round: int = 1, base: int = 0, x: float = 1.0, sends: bool = True) -> Reply:
        return answer(request_for(network, round, base, x=x)._replace(sends=sends))

    return ask


def epsilon_of(rounds: int, size: int, std: float, delta: float = 1e-3) -> float:
    return accounting.epsilon(Hidden(BATCH / size, 1 / std), rounds * STEPS, delta)


def test_each_client_calibrates_its_noise_for_its_own_number_of_records():
    plans = [agreement(client=i).records for i in range(len(NAMES))]
    for i, plan in enumerate(plans):
        (silo,) = plan.silos
        assert (silo.number, silo.records) == (i, 8 + i) and silo.rate == BATCH / (8 + i)
        spent = epsilon_of(ROUNDS, 8 + i, silo.sum.noise_std)
        assert spent <= 3.0 and spent > 2.99
    assert len({plan.silos[0].sum.noise_std for plan in plans}) == len(NAMES)


def test_the_server_knows_what_is_promised_and_nobodys_number_of_records(tmp_path):
    server = for_server(asked(), tmp_path)
    assert server.records.silos == () and server.records.epsilon(1) == 3.0
    assert all(server.agreed == agreement(client=i).agreed for i in range(len(NAMES)))
    assert "ε ≤ 3.00" in promise(server.plan) and "each record" in promise(server.plan)


def test_every_computed_round_counts_once_whether_its_message_leaves_or_not(tmp_path):
    federation = agreement()
    ask, counted = client(federation, tmp_path), record_releases_of(federation, tmp_path)
    first = ask(1)
    assert first.status == DONE and counted.count() == 1
    again = ask(1)
    assert torch.equal(again.message, first.message) and counted.count() == 1, "the same answer costs nothing"
    assert ask(1, x=2.0).status == DONE and counted.count() == 2, "another model in the same round is another look"
    assert ask(2, base=1, sends=False).status == DONE and counted.count() == 3, "the memory has moved"


def test_a_client_refuses_to_go_on_when_its_budget_is_spent(tmp_path):
    federation = agreement()
    ask = client(federation, tmp_path)
    statuses = [ask(1, x=float(i + 1)).status for i in range(ROUNDS + 2)]
    assert statuses == [DONE] * ROUNDS + [REFUSED] * 2
    counted = record_releases_of(federation, tmp_path)
    assert counted.left() == 0 and counted.epsilon() <= 3.0
    assert "budget" in ask(1, x=99.0).why


def test_another_agreement_about_the_same_records_has_what_is_left(tmp_path):
    half = client(agreement(3), tmp_path)
    for i in range(ROUNDS // 2):
        half(1, x=float(i + 1))
    other = record_releases_of(agreement(4), tmp_path)
    std = agreement(3).records.silos[0].sum.noise_std
    assert other.before() == ROUNDS // 2
    assert other.epsilon(2) == pytest.approx(epsilon_of(ROUNDS // 2 + 2, 8, std), rel=1e-6)
    assert other.left() == ROUNDS - ROUNDS // 2 and "--budget" in other.trouble()
    assert record_releases_of(agreement(4), tmp_path, budget=9.0).trouble() is None


def test_a_round_that_a_kill_cut_off_is_not_counted_twice_and_one_that_left_is(tmp_path):
    federation = agreement()
    counted = record_releases_of(federation, tmp_path)
    assert counted.reserve("one") and counted.reserve("one") and counted.count() == 1, "nothing of it was stored"
    assert counted.reserve("two") and counted.count() == 2
    counted.may_leave()
    assert counted.reserve("two") and counted.count() == 3, "it left, and is computed anew with other noise"


def test_other_data_under_the_same_agreement_are_not_computed_on(tmp_path):
    client(agreement(), tmp_path)(1)
    x, y = data()[1]
    more = for_client(asked(), NAMES[0], Examples(x, y))
    with pytest.raises(UserError, match="8 records under this agreement, and here are 9"):
        record_releases_of(more, tmp_path).left()


def test_messages_of_an_agreement_that_protected_the_client_count_as_any_other(tmp_path):
    """Another record can change a message into any other one within the radius, twice that apart."""
    secure = {"noise_std": 4.0, "delta": 1e-3, "trust": "local", "randomness": "secure"}
    before = party(config(privacy=secure, run={"rounds": ROUNDS, "seed": 3, "dtype": "float64"}), 0)
    for i in range(2):
        client(before, tmp_path)(1, x=float(i + 1))
    now = record_releases_of(agreement(4), tmp_path)
    assert now.before() == 2
    assert now.epsilon() == pytest.approx(accounting.epsilon(accounting.Open((1.0,), (0.5,)), 2, 1e-3), rel=1e-5)


def test_records_that_were_protected_alone_leave_no_epsilon_for_the_client(tmp_path):
    client(agreement(), tmp_path)(1)
    secure = {"noise_std": 40.0, "delta": 1e-3, "trust": "local", "randomness": "secure"}
    after = party(config(privacy=secure, run={"rounds": ROUNDS, "seed": 3, "dtype": "float64"}), 0)
    assert releases_of(after, tmp_path).epsilon(1) == math.inf


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"a": {"rounds": -1}}', '{"a": {"rounds": 1, "under_way": "", "records": 8, "rate": 2.0, '
               '"steps": 1, "std": 1.0}}'],
)  # fmt: skip
def test_a_damaged_count_is_not_taken_for_none(tmp_path, damage):
    (tmp_path / "records.json").write_text(damage)
    with pytest.raises(UserError, match="is damaged: put a copy of it back"):
        record_releases_of(agreement(), tmp_path).left()


def test_both_units_have_counts_of_their_own(tmp_path):
    both = {"unit": ["client", "record"], "epsilon": None, "noise_std": 40.0, "trust": "local", "record_epsilon": 3.0}
    privacy = {key: value for key, value in both.items() if value is not None}
    base = asked()
    base["privacy"] = {k: v for k, v in SECURE.items() if k not in privacy and k != "epsilon"} | privacy
    federation = party(base, 0)
    assert federation.mechanism is not None and federation.records is not None
    ask = client(federation, tmp_path)
    assert ask(1).status == DONE
    counts = [
        json.loads((tmp_path / name).read_text())[federation.agreed] for name in ("releases.json", "records.json")
    ]
    assert counts[0]["releases"] == 1 and counts[1]["rounds"] == 1 and counts[1]["beside"]
    said = promise(federation.plan)
    assert "for each client" in said and "for each record" in said


def test_a_federation_without_an_epsilon_for_records_is_refused(tmp_path):
    wrong = asked()
    wrong["privacy"] = {"unit": "record", "noise_std": 1.0, "randomness": "secure"}
    with pytest.raises(UserError, match="nobody but the client knows how many records"):
        for_server(wrong, tmp_path)


def test_a_client_with_fewer_records_than_a_batch_is_told_so():
    few = for_client(asked(), NAMES[0], Examples(np.zeros((BATCH - 1, FEATURES)), np.arange(BATCH - 1) % CLASSES))
    with pytest.raises(UserError, match=f"has {BATCH - 1} records, fewer than a batch of {BATCH}"):
        few.plan  # noqa: B018


@pytest.mark.parametrize("method", ["fed_avg", "fed_normec", "scaffold"])
def test_with_seeded_noise_a_federation_computes_what_one_process_does(tmp_path, method):
    base = asked(randomness="seeded") | {"method": {"name": method}}
    network = Network(base, tmp_path)
    over_the_wire = list(network.rounds())
    here = in_process(base)
    assert len(here) == len(over_the_wire) == ROUNDS
    for one, other in zip(here, over_the_wire, strict=True):
        torch.testing.assert_close(one.x, other.x, rtol=1e-10, atol=1e-12)
    said = over_the_wire[-1].statement
    assert said.facts["silos"] == [] and "whose records nobody else counts" in " ".join(said.text.split())


def test_secure_noise_differs_where_a_round_is_computed_anew(tmp_path):
    ask = client(agreement(), tmp_path)
    first = ask(1).message
    (tmp_path / "memory-a3.safetensors").unlink()
    assert not torch.equal(ask(1).message, first)
    assert record_releases_of(agreement(), tmp_path).count() == 2


def test_all_rows_of_a_person_are_one_record_and_are_held_out_together():
    x, y = np.random.default_rng(0).standard_normal((30, FEATURES)), np.arange(30) % CLASSES
    persons = np.arange(30) // 3
    base = asked()
    base["federation"] = base["federation"] | {"report": True, "held_out": 0.4}
    federation = for_client(base, NAMES[0], Examples(x, y, person=persons))
    (silo,) = federation.records.silos
    assert silo.records == 6 and federation.records.record.startswith("all rows of one person")
    assert "of all rows of one person" in promise(federation.plan)


def test_rounds_that_protected_a_row_leave_no_epsilon_for_a_person(tmp_path):
    """A person paid for each of its rows then; the other way round it paid for all of them at once."""
    x, y = data()[0]
    rows = for_client(asked(3), NAMES[0], Examples(x, y))
    persons = for_client(asked(4) | {"local": LOCAL | {"batch_size": 2}}, NAMES[0],
                         Examples(x, y, person=np.arange(len(y)) // 2))  # fmt: skip
    (tmp_path / "one").mkdir()
    client(rows, tmp_path / "one")(1)
    assert record_releases_of(persons, tmp_path / "one").epsilon(1) == math.inf
    assert record_releases_of(persons, tmp_path / "one", budget=50.0).left() == 0
    (tmp_path / "two").mkdir()
    client(persons, tmp_path / "two")(1)
    assert record_releases_of(rows, tmp_path / "two").epsilon(1) < math.inf


def test_the_server_says_whose_rows_are_one_record_where_that_was_agreed(tmp_path):
    base = asked() | {"data": {"label": "y", "person": "patient", "features": ["a"], "scale": {"a": [0, 1]}}}
    base["federation"] = base["federation"] | {"inputs": [1]}
    assert for_server(base, tmp_path).records.record.startswith("all rows of one person")
    assert for_server(asked(), tmp_path).records.record.startswith("one row")
