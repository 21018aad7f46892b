"""The authors' released configuration under attack."""

from __future__ import annotations

import json

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.auditing.bounds import epsilon_lower_bound
from modelmix.training import rules
from modelmix_lab.auditing.released import momentum_scores
from modelmix_lab.training.released import ReleasedRule

LARGE = 0.1


def claim(mechanism, steps, delta):
    return guarantee(mm.Ledger().add(mechanism, steps), delta).epsilon


def test_momentum_alone_with_truncated_canaries():
    """Everything mixed and truncated; only the momentum differs between the two runs."""
    mechanism, steps = mm.Mechanism(1.0, 1.0, 60.0, p=4), 40
    claimed = claim(mechanism, steps, LARGE)
    for rule, refuted in ((ReleasedRule(momentum=0.9), True), (rules.Rule("mix", momentum=0.9), False)):
        score, present = momentum_scores(mechanism, canaries=8000, steps=steps, seed=1, rule=rule)
        found = epsilon_lower_bound(score[~present], score[present], LARGE).epsilon
        assert (found > claimed) is refuted


def test_the_released_configuration_is_attacked_where_it_is_weak(run, tmp_path, monkeypatch):
    """What is claimed here is the account of mixing that norm layers do not get."""
    monkeypatch.chdir(tmp_path)  # where the plot is drawn
    mechanism = mm.Mechanism(0.307, 0.5, 400.0, p=100)
    mm.Ledger(unproved=("norm layers are not mixed",)).add(mechanism, 20).save(tmp_path / "ledger.json")
    code, out, error = run("audit", tmp_path / "ledger.json", "--quick", "--delta", 1e-2, "--trials", 100, "--json")
    assert code == 1, error  # refuted
    found = json.loads(out)
    assert found["proved"] is False
    norm = next(row for row in found["audits"] if "norm" in row["what"])
    assert norm["epsilon"] > norm["claimed"]
