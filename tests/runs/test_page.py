"""The page of a run: whole HTML, nothing unescaped, nothing promised that is not proved."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from modelmix.accounting.accountant import epsilon, epsilon_curve
from modelmix.accounting.guarantee import SEEDED, assumptions, guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.cli import show
from modelmix.errors import ModelMixError
from modelmix.report import style
from modelmix.runs import formatting, page, page_plots
from modelmix.runs.page import write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}
MIXED = Ledger().add(Mechanism(0.335, 0.03, 11.25, 100), 300)
PHASES = MIXED.add(Mechanism(0.335, 0.03, 22.5, 100), 200)
PLAIN = Ledger().add(Mechanism(1.1, 0.02), 400)
LAPLACE = Ledger().add(Mechanism(3.0, 0.05, 4.0, law="laplace"), 50)
LEDGERS = {"mixed": MIXED, "phases": PHASES, "plain": PLAIN, "laplace": LAPLACE}
REASON = "momentum is taken over updates before mixing"
UNPROVED = Ledger(MIXED.phases, unproved=(REASON,))
DELTA = 1e-5
EVIL = "<script>alert('&\"')</script>"


def a_run(folder: Path, ledger: Ledger, *, metrics: bool = True, diagnostics: bool = True, **config: object) -> Path:
    """A small run folder, as a trainer leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "rule": "mix", "padding": "exact", "clip": 20.0, "lr": {"kind": "cosine", "first": 0.15, "steps": 500},
        "momentum": 0.9, "weight_decay": 0.0, "ema": 0.99, "engine": "fast", "multiplicity": 4, "compile": False,
        "mechanism": [phase.as_dict() for phase in ledger.phases],
    }  # fmt: skip
    base = {
        "schema": "modelmix-run", "version": 1, "name": "resnet on images", "created": "2024-05-01T12:00:00+00:00",
        "seed": None, "device": "cpu", "torch": "2.6.0", "modelmix": "0.1.0", "samples": 50000, "parameters": 269722,
        "delta": DELTA, "steps": 3400, "test_public": True, "settings": settings, "data": "images", "model": "resnet20",
    }  # fmt: skip
    dump(folder / "config.json", base | config)
    ledger.save(folder / "ledger.json")
    if metrics:
        steps = range(50, ledger.steps + 1, 50)
        rows = [
            {"step": t, "epsilon": 1.23456, "test_accuracy": 0.8 - 20 / (t + 30), "test_loss": None,
             "ema_accuracy": 0.82 - 25 / (t + 30), "lr": 0.15, "seconds": 1.5}
            for t in steps
        ]  # fmt: skip
        rows.append({"step": ledger.steps + 1, "epsilon": None, "test_accuracy": None, "ema_accuracy": None})
        dump(folder / "metrics.json", {"rows": rows})
    if diagnostics:
        edges = [10 ** (-2 + i / 10) for i in range(51)]
        counts = [round(40000 * math.exp(-(((i - 32) / 6) ** 2))) for i in range(50)]
        seen = sum(counts)
        found = {
            "norm_histogram": {"edges": edges, "counts": counts}, "samples": seen, "clipped": seen // 4,
            "truncated": seen // 2, "truncated_coordinates": 7654321, "coordinates": seen * 1000, "empty_draws": 3,
            "drawn": [1499.6, 1377, 1622], "nonfinite": 0,
        }  # fmt: skip
        dump(folder / "diagnostics.json", found)
    return folder


def dump(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


class Page(HTMLParser):
    """Reads a page; fails on a tag that is not closed where it should be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.pieces: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())


def page_of(folder: Path, *, public: bool = False) -> Page:
    return Page(write_report(folder, public=public))


@pytest.mark.parametrize("public", [False, True], ids=["private", "public"])
@pytest.mark.parametrize("name", LEDGERS)
def test_a_page_is_whole_and_needs_nothing_from_elsewhere(tmp_path, name, public):
    page = page_of(a_run(tmp_path, LEDGERS[name]), public=public)
    assert page.html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(not (value or "").startswith(("http", "//")) for key, value in page.attributes if "href" in key)
    assert not re.search(r"url\((?!#)|@import", page.html)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") == (2 if public else 3)
    assert ("prefers-color-scheme: dark" in page.html, "@media print" in page.html) == (True, True)
    assert sorted(path.name for path in tmp_path.iterdir() if "report" in path.name) == [
        "report-public.html" if public else "report.html"
    ]


@pytest.mark.parametrize("name", LEDGERS)
def test_the_numbers_are_those_of_the_ledger_rounded_up(tmp_path, name):
    ledger = LEDGERS[name]
    text = page_of(a_run(tmp_path, ledger)).text
    for line in (guarantee(book, DELTA) for book in (ledger, unmixed(ledger), equal_variance(ledger))):
        assert f"{show.up(line.epsilon)} {line.accountant}" in text
    assert f"{ledger.steps} of 3,400 planned" in text
    assert f"({show.up(guarantee(ledger, DELTA).epsilon)}, 1e-05)-differential privacy" in text
    assert f"{100 * (0.8 - 20 / (ledger.steps + 30)):.2f} %" in text
    for line in assumptions(ledger, guarantee(ledger, DELTA).accountant):
        assert line in text
    assert "seeded" not in text
    assert "not proved" not in text


def test_every_phase_is_listed_until_there_are_too_many(tmp_path):
    text = page_of(a_run(tmp_path / "few", PHASES)).text
    assert "1 300 gaussian 0.335 11.25 100 0.03 -" in text
    assert "2 200 gaussian 0.335 22.5 100 0.03 -" in text
    many = Ledger(unproved=(REASON,))
    for i in range(40):
        many = many.add(Mechanism(1.0 + i / 100, 0.01), 2)
    text = page_of(a_run(tmp_path / "many", many, metrics=False, diagnostics=False)).text
    assert "15 phases more" in text
    assert "40 2 gaussian 1.39" in text


def test_what_is_covered_and_what_is_not(tmp_path):
    text = page_of(a_run(tmp_path, MIXED)).text
    for word in ("the contribution of one sample is removed", "every released state", "final model", "EMA", "momentum"):
        assert word in text
    for word in ("hyper-parameters", "one person", "finite-precision", "must stay secret", "diagnostics"):
        assert word in text[text.index("Not covered") :]
    assert "modelmix verify RUN --delta 1e-05" in text


@pytest.mark.parametrize(
    ("recipe", "assumed", "silent"),
    [
        ({}, [], ["network of the features", "whitened"]),
        ("odd", [], ["network of the features", "whitened"]),
        ({"features": "patches+prior", "normalise": "scenes"}, [], ["network of the features", "whitened"]),
        ({"features": "mine.npz"}, [], ["network of the features"]),
        ({"features": "net.onnx"}, ["no private sample taught the network of the features, net.onnx"], ["whitened"]),
        ({"features": "scatter", "normalise": "public"}, ["by which features are whitened are public"], ["taught"]),
    ],
)
def test_what_is_assumed_of_features_is_said(tmp_path, recipe, assumed, silent):
    folder = a_run(tmp_path, MIXED)
    config = json.loads((folder / "config.json").read_text())
    dump(folder / "config.json", {**config, "recipe": recipe})
    text = page_of(folder).text
    found = text[text.index("Not covered") : text.index("Not covered") + 3000]
    assert all(words in found for words in assumed)
    assert not any(words in found for words in silent)


def test_diagnostics_stand_in_a_marked_box(tmp_path):
    page = page_of(a_run(tmp_path, MIXED))
    assert ("class", "box") in page.attributes
    assert formatting.DIAGNOSTICS.replace("`", "") in page.text.replace(" ;", ";")
    for word in ("25.00 %", "50.00 %", "7,654,321", "1,499.6 / 1,377 / 1,622", "clip c = 20", "l2 norm"):
        assert word in page.text
    assert "l1 norm" in page_of(a_run(tmp_path / "laplace", LAPLACE)).text


def test_the_public_page_leaves_out_diagnostics_and_the_seed(tmp_path):
    page = page_of(a_run(tmp_path, MIXED, seed=987654321), public=True)
    for word in ("data holder's eyes only", "7,654,321", "1,377", "norm of a sample", "987654321"):
        assert word not in page.html
    assert ("class", "box") not in page.attributes
    assert SEEDED in page.text
    assert "987654321" in page_of(tmp_path).text


def test_what_was_measured_on_a_private_test_set_is_not_published(tmp_path):
    a_run(tmp_path, MIXED, test_public=False)
    page, own = page_of(tmp_path, public=True), page_of(tmp_path)
    accuracy = f"{100 * (0.8 - 20 / (MIXED.steps + 30)):.2f} %"
    assert accuracy in own.text
    assert accuracy not in page.text
    assert page.tags.count("svg") == 1
    assert formatting.TEST_LEFT_OUT in page.text
    for found in (page, own):
        assert "metrics on the test set" in found.text[found.text.index("Not covered") :]
    covered = page_of(a_run(tmp_path / "open", MIXED), public=True)
    assert accuracy in covered.text
    assert "metrics on the test set" not in covered.text


@pytest.mark.parametrize("adjacency", ["zero-out", "add-or-remove"])
def test_a_run_that_stopped_early_states_the_epsilon_of_its_plan(tmp_path, adjacency):
    plan = Plan(PLAIN.phases, DELTA, 40_321, adjacency)
    taken = replace(plan.ledger, phases=()).add(PLAIN.phases[0].mechanism, 100)
    page = page_of(a_run(tmp_path, taken, plan=plan.as_dict(), samples=None))
    whole, so_far = (show.up(guarantee(book, DELTA).epsilon) for book in (plan.ledger, taken))
    assert whole != so_far
    assert f"({whole}, 1e-05)-differential privacy" in page.text
    assert f"{so_far} only if it was fixed beforehand to stop after 100 steps" in page.text
    assert f"{taken.steps} of {plan.steps} planned" in page.text
    assert guarantee(plan.ledger, DELTA).relation in page.text


@pytest.mark.skipif(os.name != "posix", reason="permissions of files")
def test_only_the_public_page_is_for_other_eyes(tmp_path):
    a_run(tmp_path, MIXED)
    assert write_report(tmp_path).stat().st_mode & 0o077 == 0
    assert write_report(tmp_path, public=True).stat().st_mode & 0o400


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("ledger", [UNPROVED, Ledger(PLAIN.phases, unproved=(REASON, EVIL))], ids=["mixed", "plain"])
def test_a_run_that_is_not_proved_has_no_epsilon_on_its_page(tmp_path, ledger, public):
    a_run(tmp_path, ledger, claimed_epsilon=8.125, settings={"clip": 1.0, "target_epsilon": 7.75})
    page = page_of(tmp_path, public=public)
    honest = Ledger(ledger.phases)
    for book in (honest, unmixed(honest), equal_variance(honest)):
        value = guarantee(book, DELTA).epsilon
        assert all(f"{show.up(value, digits)}" not in page.text for digits in (1, 2, 3, 4))
    assert "1.2345" not in page.html  # the metrics' column
    assert "epsilon at delta" not in page.html
    assert "-differential privacy" not in page.text
    assert page.text.count("epsilon: not proved") == 2  # banner, and in the number's place
    assert "claimed, not proved: 8.125" in page.text
    assert "target_epsilon (not proved) 7.75" in page.text
    assert page.text.count(REASON) == 2
    assert formatting.NOTHING_COVERED in page.text
    assert page.tags.count("svg") == (1 if public else 2)


@pytest.mark.parametrize("public", [False, True])
def test_a_seeded_run_says_so(tmp_path, public):
    page = page_of(a_run(tmp_path, PLAIN, seed=0), public=public)
    assert ("class", "banner") in page.attributes
    assert SEEDED in page.text
    assert page.text.count("holds only against those who neither know the seed") == 3  # banner, number, guarantee


def test_silence_about_the_seed_is_no_guarantee(tmp_path):
    a_run(tmp_path, PLAIN)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["seed"]
    dump(tmp_path / "config.json", config)
    assert formatting.SEED_UNKNOWN in page_of(tmp_path).text


def test_a_run_with_the_bare_minimum(tmp_path):
    tmp_path.joinpath("config.json").write_text('{"schema": "modelmix-run", "version": 1, "delta": 1e-6, "seed": null}')
    Ledger().save(tmp_path / "ledger.json")
    page = page_of(tmp_path)
    assert "No step was taken." in page.text
    assert "No accuracy was recorded." in page.text
    assert "svg" not in page.tags


def test_missing_and_odd_values_are_dashes(tmp_path):
    a_run(tmp_path, PLAIN, steps=None, data=None, samples=None)
    dump(tmp_path / "metrics.json", {"rows": [{"step": 1, "test_accuracy": math.nan}, {"step": 2}, {}]})
    dump(tmp_path / "diagnostics.json", {"norm_histogram": None, "samples": 0, "clipped": 0, "drawn": None})
    page = page_of(tmp_path)
    assert "samples whose norm was clipped - 0 of 0" in page.text
    assert "drawn batch size: mean, smallest, largest - / - / -" in page.text
    assert "planned" not in page.text.replace("steps planned -", "")
    assert page.tags.count("svg") == 1


def test_no_finite_epsilon_is_said_loudly(tmp_path):
    page = page_of(a_run(tmp_path, Ledger().add(Mechanism(1e-158, 0.5), 10), diagnostics=False))
    assert formatting.UNBOUNDED in page.text
    assert formatting.NOTHING_COVERED in page.text
    assert "-differential privacy" not in page.text
    assert "svg" not in page.tags


def test_everything_is_escaped(tmp_path):
    ledger = Ledger(MIXED.phases, unproved=(EVIL,))
    settings = {EVIL: EVIL, "clip": EVIL, "deep": [{"x": [EVIL, None, {"y": EVIL}]}], "empty": {}}
    evil = dict.fromkeys(("name", "created", "device", "torch", "modelmix", "data", "model", "samples"), EVIL)
    a_run(tmp_path, ledger, settings=settings, claimed_epsilon=EVIL, steps=EVIL, seed=EVIL, parameters=EVIL, **evil)
    dump(tmp_path / "metrics.json", {"rows": [{"step": EVIL, "test_accuracy": EVIL}]})
    for key in ("clipped", "samples", "drawn", "empty_draws", "nonfinite"):
        dump(tmp_path / "diagnostics.json", {key: [EVIL] * 3})
        page = page_of(tmp_path)
        assert "script" not in page.tags
        assert "<script" not in page.html
        assert EVIL in page.text


def test_names_that_utf8_cannot_write_and_settings_without_end(tmp_path):
    deep: object = 1
    for _ in range(200):
        deep = {"x": [deep]}
    page = page_of(a_run(tmp_path, PLAIN, name="half \ud800 a pair, 名前 `x`", settings={"deep": deep}))
    assert "half ? a pair, 名前 `x`" in page.text


def break_config(key: str, value: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        dump(folder / "config.json", config | {key: value})

    return change


def write(name: str, text: str):
    return lambda folder: (folder / name).write_bytes(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json: No such file"),
        (lambda folder: (folder / "ledger.json").unlink(), "cannot read .*ledger.json: No such file"),
        (write("config.json", '{"schema": '), "config.json is not whole JSON: "),
        (write("metrics.json", '{"rows": [{"st'), "metrics.json is not whole JSON: "),
        (write("diagnostics.json", ""), "diagnostics.json is not whole JSON: "),
        (write("metrics.json", '{"rows": "\xff"}'), "metrics.json is not whole JSON: "),
        (write("metrics.json", "[1]"), "metrics.json is not a JSON object"),
        (write("metrics.json", '{"rows": [1]}'), 'metrics.json: "rows" must be a list of objects'),
        (write("diagnostics.json", '{"norm_histogram": [1]}'), "norm_histogram"),
        (write("diagnostics.json", '{"norm_histogram": {"edges": [1, 2], "counts": [3, 4]}}'), "norm_histogram"),
        (write("diagnostics.json", '{"norm_histogram": {"edges": [0, 2], "counts": [3]}}'), "norm_histogram"),
        (write("diagnostics.json", '{"norm_histogram": {"edges": [1, 2], "counts": ["3"]}}'), "norm_histogram"),
        (write("diagnostics.json", '{"norm_histogram": {"edges": [1], "counts": []}}'), "norm_histogram"),
        (write("ledger.json", "{}"), "this is not a ledger"),
        (break_config("schema", "other"), "is not the configuration of a run"),
        (break_config("version", 7), "has version 7"),
        (break_config("delta", 2), "delta = 2 is not allowed"),
        (break_config("delta", None), "delta = None is not a finite number"),
        (break_config("settings", [1]), '"settings" must be an object'),
    ],
)
def test_broken_files_are_refused_in_one_line_and_leave_nothing(tmp_path, change, message):
    a_run(tmp_path, PLAIN)
    (tmp_path / "report.html").write_text("the old page")
    change(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelMixError, match=message) as error:
        write_report(tmp_path)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "report.html").read_text() == "the old page"


def test_a_missing_folder_and_a_folder_in_the_way(tmp_path):
    with pytest.raises(ModelMixError, match="there is no such folder"):
        write_report(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (a_run(tmp_path / "run", PLAIN) / "report.html").mkdir()
    with pytest.raises(ModelMixError, match="cannot write"):
        write_report(str(tmp_path / "run"))


def test_a_failure_while_writing_leaves_the_old_page(tmp_path, monkeypatch):
    a_run(tmp_path, PLAIN)
    write_report(tmp_path)
    old = (tmp_path / "report.html").read_text()
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    break_config("name", "another name")(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ModelMixError, match=r"cannot write .*: No space left on device"):
        write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "report.html").read_text() == old


def test_a_page_is_the_same_every_time(tmp_path):
    first = write_report(a_run(tmp_path, PHASES)).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_prefixes_of_a_ledger_add_up():
    assert page_plots.prefix(PHASES, 300) == MIXED
    assert page_plots.prefix(PHASES, 500) == PHASES
    assert page_plots.prefix(PHASES, 301).phases[1].steps == 1
    assert page_plots.prefix(UNPROVED, 3).unproved == (REASON,)
    mechanism = MIXED.phases[0].mechanism
    by_prefix = [epsilon(page_plots.prefix(MIXED, t), DELTA) for t in (1, 7, 300)]
    assert by_prefix == pytest.approx(epsilon_curve(mechanism, [1, 7, 300], DELTA), rel=1e-9)


def test_a_page_needs_no_torch(tmp_path):
    a_run(tmp_path, PLAIN)
    program = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from modelmix.runs.page import write_report
write_report({str(tmp_path)!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_page_without_jinja2_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page._template.cache_clear()
    with pytest.raises(
        ModelMixError, match=r"^the page needs jinja2: install it with pip install 'modelmix\[report\]'"
    ):
        write_report(a_run(tmp_path, PLAIN))
    assert not style.available()


def test_the_command_writes_the_page(tmp_path, capsys):
    from modelmix.cli.report import report

    report(a_run(tmp_path, PLAIN), public=True)
    assert capsys.readouterr().out == f"written: {tmp_path / 'report-public.html'}\n"
    assert (tmp_path / "report-public.html").exists()
