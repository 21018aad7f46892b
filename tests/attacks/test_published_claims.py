"""What is published of a run says what holds for the run as it stands, and everything that goes with it."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

import planned
import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.cli import main
from modelmix.runs.callbacks import ReportPage
from modelmix.runs.page import write_report
from modelmix.runs.record import PUBLISHED
from modelmix.training.checkpoint import RunFiles

X = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 2
PLAN = mm.plan(delta=1e-5, steps=10, noise_multiplier=1.0, samples=300, sample_rate=0.1)


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return call


def trainer(folder: Path, plan: mm.Plan = PLAN, **more) -> mm.Trainer:
    torch.manual_seed(0)
    return planned.Trainer(
        nn.Linear(5, 2), nn.CrossEntropyLoss(), (X, Y), plan, clip=1.0, lr=0.1, folder=folder, **more
    )


def published(folder: Path) -> set[str]:
    return {name for name in PUBLISHED if (folder / name).exists()}


# A certificate of another plan.


def done(folder: Path, **more) -> Path:
    trainer(folder, **more).run(progress=False)
    write_report(folder, public=True)
    assert published(folder) == set(PUBLISHED)
    return folder


def test_a_longer_plan_withdraws_what_was_published_of_the_shorter(tmp_path):
    """Finished, extended and killed: certificate and page said 1.26 for a run of 3.99."""
    t = trainer(tmp_path / "one")
    t.run(progress=False)
    write_report(tmp_path / "one", public=True)
    t.extend(100)
    assert published(tmp_path / "one") == set()
    trainer(done(tmp_path / "two"), PLAN.extended(100), resume=True)
    assert published(tmp_path / "two") == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_was_published_goes_before_the_longer_plan_comes(tmp_path, name, monkeypatch):
    """A kill at any moment leaves no certificate beside a longer plan."""
    from modelmix.runs.folder import RunFolder

    folder = done(tmp_path / "run")

    class Killed(BaseException):
        pass

    def write(self, file, *rest, **more):
        assert not (folder / name).exists(), file
        raise Killed

    monkeypatch.setattr(RunFolder, "_write", write)
    with pytest.raises(Killed):
        trainer(folder, PLAN.extended(100), resume=True)


def test_steps_that_are_kept_withdraw_what_does_not_count_them(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    trainer(folder).run(5, progress=False)
    before = (folder / "certificate.json").read_text()
    t = trainer(folder, resume=True)
    assert (folder / "certificate.json").read_text() == before, "nothing has changed yet"
    monkeypatch.setattr(ReportPage, "on_finish", lambda self, run: None)
    monkeypatch.setattr(RunFiles, "finish", lambda self: None)  # killed after the last step is kept
    t.run(2, progress=False)
    assert published(folder) == set()
    monkeypatch.undo()
    trainer(folder, resume=True).run(0, progress=False)
    assert json.loads((folder / "certificate.json").read_text())["steps_taken"] == 7


@pytest.mark.parametrize("change", ["ledger_digest", "steps", "epsilon", "adjacency", "gone"])
def test_verify_refuses_a_certificate_that_is_not_of_the_run(run, tmp_path, change):
    folder = done(tmp_path / "run")
    assert run("verify", folder)[0] == 0
    said = json.loads((folder / "certificate.json").read_text())
    if change == "ledger_digest":
        said[change] = mm.Ledger().digest
    elif change == "gone":
        del said["guarantee"]
    else:
        said["guarantee"][change] = {"steps": 9, "epsilon": 0.1, "adjacency": "add-or-remove"}[change]
    (folder / "certificate.json").write_text(json.dumps(said))
    for place in (folder, folder / "ledger.json"):
        code, out, err = run("verify", place, "--delta", 1e-6)
        assert (code, out) == (2, "")
        assert "certificate.json is not of this run as it stands" in err
    os.unlink(folder / "certificate.json")
    assert run("verify", folder)[0] == 0


# One guarantee, in every place.


def test_page_certificate_and_verify_say_the_same(run, tmp_path):
    """What nonfinite="stop" and the loop engine leave open stood in the certificate and not on the page."""
    folder = done(tmp_path / "run", nonfinite="stop", performance=mm.Performance(engine="loop"))
    told = trainer(folder, nonfinite="stop", performance=mm.Performance(engine="loop"), resume=True).guarantee
    special = [
        line for line in (*told.assumed, *told.excluded) if re.search("whether and when|keep nothing|test", line)
    ]
    assert len(special) == 3
    certified = json.loads((folder / "certificate.json").read_text())["guarantee"]
    assert [line for line in special if line not in certified["not_covered"] + certified["assumed"]] == []
    verified = json.loads(run("verify", folder, "--json")[1])
    assert mm.guarantee(mm.load_claim(folder), 1e-5) == mm.load_claim(folder).guarantee(1e-5)
    texts = [run("verify", folder)[1], run("epsilon", "--ledger", folder)[1], str(told)]
    texts += [html.unescape((folder / name).read_text()) for name in PUBLISHED[1:]]
    for line in special:
        assert line in verified["not_covered"] + verified["assumed"]
        for text in texts:
            assert line in " ".join(text.split()), line


def test_an_engine_of_before_is_remembered(run, tmp_path):
    """Begun one sample at a time, resumed another way: what was assumed for the first steps is still assumed."""
    folder = tmp_path / "run"
    trainer(folder, performance=mm.Performance(engine="loop"), test_public=False).run(5, progress=False)
    again = trainer(folder, resume=True, test_public=True)
    assert again.engine == "hooks"
    again.run(progress=False)
    assert any("keep nothing of one sample" in line for line in again.guarantee.assumed)
    assert any("test set" in line for line in again.guarantee.excluded)
    assert "keep nothing of one sample" in (folder / "certificate.json").read_text()
    late = tmp_path / "late"
    trainer(late).run(5, progress=False)
    trainer(late, resume=True, performance=mm.Performance(engine="loop"))
    assert "keep nothing of one sample" in run("verify", late)[1]


def test_a_configuration_of_before_says_what_its_settings_say(run, tmp_path):
    folder = done(tmp_path / "run", nonfinite="stop", performance=mm.Performance(engine="loop"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("assumed", "excluded"):
        assert config.pop(name)
    (folder / "config.json").write_text(json.dumps(config))
    out = " ".join(run("verify", folder)[1].split())
    for line in ("whether and when the run stopped", "keep nothing of one sample", "metrics on the test set"):
        assert line in out
    (folder / "config.json").write_text(json.dumps({**config, "assumed": "text"}))
    assert "must be a list of sentences" in run("verify", folder)[2]


# Files of metrics.


def events_of(folder: Path) -> Path:
    (path,) = (folder / "events").iterdir()
    return path


@pytest.mark.parametrize("public", [False, True])
def test_files_of_metrics_name_the_condition_of_their_epsilon(tmp_path, public):
    """An "epsilon" of the steps so far stood in files for everybody, beside metrics of a private test set."""
    folder = tmp_path / "run"
    for resume, steps in ((False, 5), (True, 2)):
        t = trainer(folder, test_set=(X[:50].clone(), Y[:50].clone()), test_public=public, resume=resume)
        t.run(steps, evaluate_every=1, progress=False)
        rows = json.loads((folder / "metrics.json").read_text())["rows"]
        assert not any("epsilon" in row for row in rows)
        assert [row["epsilon_if_stopping_was_fixed_beforehand"] for row in rows] == [r["epsilon"] for r in t.metrics]
        written = events_of(folder).read_bytes()
        assert b"epsilon_if_stopping_was_fixed_beforehand" in written
        assert b"\x07epsilon" not in written
        for path in (folder / "metrics.json", events_of(folder)):
            assert bool(path.stat().st_mode & 0o044) is public
    again = trainer(folder, test_set=(X[:50].clone(), Y[:50].clone()), test_public=not public, resume=True)
    again.run(1, progress=False)
    for path in (folder / "metrics.json", events_of(folder)):
        assert not path.stat().st_mode & 0o044
