"""The tables of results: medians, marks, links, what is left out, and the committed page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from modelmix.accounting.ledger import Ledger
from modelmix.errors import ModelMixError
from modelmix_lab.experiments import tables
from modelmix_lab.experiments.results import Result, account, place, read
from modelmix_lab.report import results_page
from modelmix_lab.report.summary import summarise

ROOT = Path(__file__).parents[3]
SAMPLES = {"cifar10": 50_000, "svhn": 73_257, "fashion-mnist": 60_000}


def result(
    accuracy: float,
    kind: str = "plain",
    seed: int = 1,
    row: str = "cifar10-eps8",
    table: str = "table2",
    **changes: object,
) -> Result:
    """Of a run nobody made; ``accuracy`` in per cent."""
    recipe = tables.row(table, row).recipe(kind, seed)
    ledger = recipe.whole(SAMPLES[recipe.data.source])
    if kind == "released":
        ledger = Ledger(ledger.phases, ("a rule",))
    made = Result(
        table=table,
        row=row,
        kind=kind,
        seed=seed,
        rehearsal=False,
        recipe=recipe.as_dict(),
        data={"name": recipe.data.source, "train": SAMPLES[recipe.data.source], "test": 10_000},
        accuracy={"reported": "last", "last": accuracy / 100, "average": None},
        epsilon=account(ledger, 1e-5),
        ledger=json.loads(ledger.to_json()),
        steps=recipe.privacy.steps,
        seconds={"training": 50.0, "total": 60.0 + seed},
        hardware="a machine",
        performance={},
        versions={},
        date="2030-01-01T00:00:00+00:00",
        path=Path("results") / place(table, row, kind, seed),
    )
    return replace(made, **changes)


def cell(*results: Result):
    (found,) = summarise(results).cells.values()
    return found


def page(*results: Result) -> str:
    return results_page.render(summarise(results), Path())


def line(text: str, row: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return found.strip("| ").split(" | ")


@pytest.mark.parametrize(
    ("accuracies", "median"), [([50.0], 50), ([50, 60], 50), ([70, 50, 60], 60), ([50, 60, 70, 80], 60)]
)
def test_the_median_is_that_of_a_run_and_never_above_the_middle(accuracies, median):
    found = cell(*(result(accuracy, seed=seed) for seed, accuracy in enumerate(accuracies, 1)))
    assert found.middle.reported == pytest.approx(median)
    assert found.spread == pytest.approx((min(accuracies), max(accuracies)))
    assert [one.seed for one in found.results] == list(range(1, len(accuracies) + 1))


@pytest.mark.parametrize(
    ("kind", "accuracy", "reaches"),
    [
        ("plain", 56.1, True),
        ("plain", 56.06, True),
        ("plain", 56.04, False),
        ("best", 70.4, True),
        ("best", 70.3, False),
    ],
)
def test_every_kind_is_measured_by_the_number_printed_for_it(kind, accuracy, reaches):
    found = cell(result(accuracy, kind))
    assert found.reaches is reaches
    marked = next(text for text in line(page(result(accuracy, kind)), "cifar10-eps8") if "](" in text)
    assert marked.startswith("**[") is reaches
    assert (results_page.BELOW in marked) is not reaches


def test_a_cell_says_all_and_leads_to_its_file():
    text = page(*(result(50 + seed, seed=seed) for seed in (1, 2, 3)))
    assert "[52.0](results/table2/cifar10-eps8/plain-2.json) ↓ (51.0-53.0, 3)" in line(text, "cifar10-eps8")
    runs = line(text, "table2 cifar10-eps8")
    assert runs[2:] == ["[51.00](results/table2/cifar10-eps8/plain-1.json), "
                        "[52.00](results/table2/cifar10-eps8/plain-2.json), "
                        "[53.00](results/table2/cifar10-eps8/plain-3.json)",
                        "7.9988", "3,500", "62", "cifar10", "a machine"]  # fmt: skip


def test_what_was_not_run_is_shown():
    text = page(result(50))
    for name in tables.TABLES:
        for row in tables.rows(name):
            assert line(text, row.name)[4:].count("-") == (4 if row.name == "cifar10-eps8" else 5)


def test_an_epsilon_above_that_of_the_row_is_named_and_reaches_nothing():
    cheap = tables.row("table2", "svhn-eps8").recipe("plain", 1).whole(SAMPLES["cifar10"])
    dear = result(99, ledger=json.loads(cheap.to_json()))
    found = cell(dear)
    assert found.epsilon > 8
    assert not found.reaches
    assert re.search(r"99\.0.* ↓ \(1 run, epsilon \d+\.\d\d\)", page(dear))


def test_what_is_not_proved_has_no_epsilon():
    runs = line(page(result(70, "released")), "table2 cifar10-eps8")
    assert runs[3] == "not proved"
    assert cell(result(70, "released")).epsilon is None


def test_a_run_beside_which_nothing_is_printed_has_no_mark():
    one = result(90, row="cifar10-eps0.64", table="transfer")
    assert cell(one).reaches is None
    found = line(page(one), one.row)
    assert found[3] == "-"
    assert "[90.0](results/transfer/cifar10-eps0.64/plain-1.json) (1 run)" in found


def test_a_run_without_privacy_says_so():
    one = result(95, "best", row="cifar10-epsinf", table="transfer")
    assert cell(one).reaches
    assert line(page(one), one.row)[1] == "inf"
    assert line(page(one), f"transfer {one.row}")[3] == "no privacy"


def test_what_privacy_costs_is_told_where_both_were_run():
    free, ours = (
        result(95, "best", row="cifar10-epsinf", table="transfer"),
        {"row": "cifar10-eps2", "table": "transfer"},
    )
    private = result(92.4, **ours), result(91, "best", **ours)
    told = "cifar10-eps2: points below 95.00, the best run without privacy: plain DP-SGD 2.60, best proved 4.00."
    assert told in page(free, *private).splitlines()
    for some in (private, (free,)):
        assert "without privacy:" not in page(*some).replace("Without privacy: noise", "")


def test_epsilons_come_from_the_ledger_and_not_from_what_a_file_claims():
    assert cell(result(50, epsilon={"status": "proved", "value": 0.1})).epsilon == pytest.approx(8, abs=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {**tables.row("table2", "cifar10-eps8").recipe("plain", 1).as_dict(), "optimizer": {"lr": 0.2}}},
        {"recipe": {"of": "the future"}},
        {"row": "cifar10-eps9"},
    ],
)
def test_results_of_an_older_recipe_are_left_out_and_named(changes):
    old = replace(result(99), **changes)
    found = summarise([old, result(50, seed=2)])
    assert found.outdated == (old,)
    assert [len(cell.results) for cell in found.cells.values()] == [1]


def test_two_results_of_one_run_are_refused():
    with pytest.raises(ModelMixError, match="are results of the same run: keep one of them"):
        summarise([result(50), result(51)])


def test_a_result_is_read_as_it_was_written(tmp_path):
    for one in (result(50, "paper"), result(50, "paper", same_run_as="table3/a/paper-1.json")):
        one.save(tmp_path / "one.json")
        assert Result.load(tmp_path / "one.json") == one


def test_a_cut_off_file_is_refused(tmp_path):
    path = tmp_path / place("table2", "cifar10-eps8", "plain", 1)
    result(50).save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelMixError, match="not whole JSON"):
        read([tmp_path])


# The command.


def test_twins_must_agree(tmp_path):
    one = result(70.0)
    other = result(70.0, row="cifar10-eps7", same_run_as=str(place("table2", "cifar10-eps8", "plain", 1)))
    other = replace(other, ledger=one.ledger)
    for each in (one, other):
        each.save(tmp_path / place(each.table, each.row, each.kind, each.seed))
    assert len(read([tmp_path])) == 2
    changed = replace(one, accuracy={**one.accuracy, "last": 0.71})
    changed.save(tmp_path / place("table2", "cifar10-eps8", "plain", 1))
    with pytest.raises(ModelMixError, match=r"says that it is the same run as .* and their numbers differ"):
        read([tmp_path])
    (tmp_path / place("table2", "cifar10-eps8", "plain", 1)).unlink()
    assert len(read([tmp_path])) == 1


def test_a_folder_that_cannot_be_read_is_not_skipped(tmp_path, monkeypatch):
    one = result(70.0)
    one.save(tmp_path / place(one.table, one.row, one.kind, one.seed))
    right = Path.iterdir

    def closed(self):
        if self.name == one.row:
            raise PermissionError(13, "Permission denied", str(self))
        return right(self)

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(ModelMixError, match=r"cannot read .*cifar10-eps8: Permission denied"):
        read([tmp_path])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for one in (result(57.0), result(58.0, seed=2), result(30.0, "paper"), result(70.0, "released")):
        one.save(tmp_path / "results" / place(one.table, one.row, one.kind, one.seed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_on_screen_page_and_figure(run, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run("results", "--markdown", "page/all.md", "--figure", "page/figures/all.png")
    assert (code, err) == (0, "")
    assert re.search(r"cifar10-eps8 +70\.4 +56\.1 .*30\.0 \(1 run\)↓ +57\.0 \(57\.0-58\.0, 2\)", out)
    assert "plain: 3,500 steps, 62 s a run, a machine" in out
    text = (folder / "page/all.md").read_text()
    assert "![test accuracy against epsilon](figures/all.svg)" in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (folder / "page" / link).is_file(), link
    assert (folder / "page/figures/all.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = run("results")
    assert re.search(r"cifar10-eps8 +70\.4 +56\.1 +70\.0↓ +30\.0↓ +57\.0 +- +-", narrow)
    for row in (row for name in tables.TABLES for row in tables.rows(name)):
        assert re.search(rf"(?m)^{re.escape(row.name)} .{{,{79 - len(row.name)}}}$", narrow)  # no name is cut off


def test_json(run, folder):
    code, out, _ = run("results", "results", "--json")
    rows = {row["row"]: row for row in json.loads(out)["tables"]["table2"]}
    found = rows["cifar10-eps8"]["runs"]
    assert code == 0
    assert (found["plain"]["median"], found["plain"]["seeds"]) == (pytest.approx(57), [1, 2])
    assert found["plain"]["reaches_paper"] is True
    assert found["released"]["proved_epsilon"] is None
    assert rows["cifar10-eps4"]["runs"] == {}


def test_committed_results_come_first(run, folder):
    (folder / "docs" / "results").mkdir(parents=True)
    rows = json.loads(run("results", "--json")[1])["tables"]["table2"]
    assert not any(row["runs"] for row in rows)


def test_no_results_at_all(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("results", "--markdown", "all.md", "--figure", "all.svg")
    assert code == 0
    assert err.startswith("modelmix-lab: no results in docs/results, results: ")
    assert "No runs yet." in (tmp_path / "all.md").read_text()
    assert "70.4" in out


def test_outdated_results_are_named(run, folder):
    path = folder / "results" / place("table2", "cifar10-eps8", "paper", 1)
    found = json.loads(path.read_text())
    found["recipe"]["optimizer"]["lr"] = 0.3
    path.write_text(json.dumps(found))
    code, _, err = run("results")
    assert code == 0
    assert err == (
        "modelmix-lab: left out results/table2/cifar10-eps8/paper-1.json: its recipe is no longer that of the row.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder of results"),
        (["x" * 300], "x is not a folder of results"),
        (["--figure", "figure.jpg"], "the name must end in .png, .svg or .pdf"),
        (["--markdown", "results"], "it is a folder"),
    ],
)
def test_mistakes_are_one_line(run, folder, arguments, message):
    code, out, err = run("results", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_committed_page_is_what_the_committed_results_say(monkeypatch):
    """To write it again: modelmix-lab results --markdown docs/results.md --figure docs/figures/accuracy.png"""
    monkeypatch.chdir(ROOT)
    committed = Path("docs/results")
    found = summarise(read([committed] if committed.is_dir() else []))
    assert not found.outdated
    text = results_page.render(found, Path("docs"), Path("docs/figures/accuracy.png"))
    assert Path("docs/results.md").read_text(encoding="utf-8") == text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (Path("docs") / link).is_file(), link
