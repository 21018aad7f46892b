"""The page of a run: one file that says what was trained, what it cost in privacy, and what that does not cover."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelmix._files import write_atomically
from modelmix._format import up
from modelmix.accounting.guarantee import COVERED, SEEDED, Guarantee, guarantee
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.accounting.runs import TEST_METRICS, Claim
from modelmix.runs import formatting
from modelmix.runs import page_plots as plots
from modelmix.runs.page_data import Run, read_run
from modelmix.runs.page_html import Html, bullets, coded, document, joined, table, tag

_FIRST_PHASES, _LAST_PHASES = 20, 5  # of a ledger too long to print
_DEEPEST = 8  # level of nested settings
_ABOUT = (
    "created",
    "data",
    "model",
    "population",
    "adjacency",
    "test_public",
    "parameters",
    "delta",
    "steps",
    "seed",
    "device",
    "torch",
    "modelmix",
)


def write_report(folder: str | Path, *, public: bool = False) -> Path:
    """Writes ``report.html`` into a run folder and returns its path.

    The page needs no network and no script. Epsilon is recomputed from the ledger and rounded up; for a run whose
    ledger is not proved the page says so instead, and prints none. With ``public`` the page is ``report-public.html``
    and leaves out what epsilon does not cover: the seed, the diagnostics and, unless the test set was declared public,
    what was measured on it; the other one is readable by its owner only. The file is written atomically: the old page
    or the new one, never half of one.
    """
    folder = Path(folder)
    page = render(read_run(folder), public=public)
    path = folder / ("report-public.html" if public else "report.html")
    # A name may hold half a surrogate pair, which JSON can write and UTF-8 cannot.
    write_atomically(path, page.encode("utf-8", "replace"), secret=not public)
    return path


def render(run: Run, *, public: bool = False) -> str:
    """The page as text."""
    best = proved(run, public=public)
    return document(
        f"{run.name} - ModelMix run",
        _title(run),
        *_banners(run, best),
        _facts(run, best, public),
        _progress(run, best, public),
        _comparison(run, best),
        _phases(run),
        _guarantee(run, best),
        *([] if public or run.diagnostics is None else [_diagnostics(run, run.diagnostics)]),
        _settings(run, public),
        _recheck(run),
    )


def proved(run: Run, *, public: bool = False) -> Guarantee | None:
    """The guarantee of everything the run planned, with what the run leaves uncovered; None where none is proved."""
    if run.unproved:
        return None
    found = run.claim.guarantee(run.delta)
    more = Claim(
        run.planned,
        run.ledger,
        assumed=tuple(formatting.assumed_by(run.recipe)),  # known to older runs from their recipe alone
        excluded=() if run.test_public else (TEST_METRICS,),
    )
    found = more.qualified(found)
    where = "" if public or run.diagnostics is None else ", in the marked box below"
    diagnostics = f"diagnostics of the training: norms, clips and batch sizes{where}"
    return replace(found, excluded=(*found.excluded, diagnostics))


def _title(run: Run) -> Html:
    about = [str(run.config[key]) for key in ("model", "data", "created") if run.config.get(key)]
    return joined([tag("h1", run.name), tag("p", ", ".join(about), kind="soft")])


def _banners(run: Run, best: Guarantee | None) -> Iterator[Html]:
    if best is None:
        yield tag("div", formatting.NOT_PROVED, bullets(run.unproved), kind="banner")
    elif math.isinf(best.epsilon):
        yield tag("div", formatting.UNBOUNDED, kind="banner")
    if "seed" not in run.config:
        yield tag("div", formatting.SEED_UNKNOWN, kind="banner")
    elif run.planned.seeded:
        yield tag("div", SEEDED, kind="banner")


def _facts(run: Run, best: Guarantee | None, public: bool) -> Html:
    tested = [] if _withheld(run, public) else [_accuracy_fact(run)]
    return tag("div", *tested, _epsilon_fact(run, best), _steps_fact(run), kind="facts")


def _withheld(run: Run, public: bool) -> bool:
    """Whether what was measured on the test set stays out of the page."""
    return public and not run.test_public


def _accuracy_fact(run: Run) -> Html:
    tested, averaged = run.series("test_accuracy"), run.series("ema_accuracy")
    value = f"{100 * tested[-1][1]:.2f} %" if tested else "-"
    return _fact("test accuracy", value, f"of the average (EMA): {100 * averaged[-1][1]:.2f} %" if averaged else "")


def _epsilon_fact(run: Run, best: Guarantee | None) -> Html:
    if best is None:
        claim = run.config.get("claimed_epsilon")
        return _fact("privacy", formatting.NOT_PROVED, "" if claim is None else f"claimed, not proved: {_plain(claim)}")
    note = f"{best.accountant}, rounded up"
    if best.steps > run.ledger.steps:
        so_far = up(guarantee(run.ledger, run.delta).epsilon)
        note += (
            f"; for all planned steps, however early the run was stopped ({so_far} only if it was fixed beforehand to "
            f"stop after {formatting.count(run.ledger.steps)} steps)"
        )
    if best.seeded:
        note += f"; {SEEDED}"
    return _fact(f"epsilon at delta = {run.delta!r}", up(best.epsilon), note)


def _steps_fact(run: Run) -> Html:
    planned = run.planned.steps if "plan" in run.config else run.config.get("steps")
    note = "" if planned is None else f"of {formatting.count(planned)} planned"
    return _fact("steps", formatting.count(run.ledger.steps), note)


def _fact(label: str, value: str, note: str = "") -> Html:
    return tag(
        "div",
        tag("div", label, kind="soft"),
        tag("div", value, kind="value"),
        *([tag("div", note, kind="soft")] if note else []),
        kind="fact",
    )


def _progress(run: Run, best: Guarantee | None, public: bool) -> Html:
    withheld = _withheld(run, public)
    lines = {} if withheld else {"model": run.series("test_accuracy"), "average (EMA)": run.series("ema_accuracy")}
    drawn = [plots.accuracy(lines)] if any(lines.values()) else []
    curve = None if best is None else plots.epsilon_curve(run.planned, run.delta, best)
    if curve is not None:
        drawn.append(curve)
    body = tag("div", *(tag("figure", plot) for plot in drawn), kind="plots")
    notes = [] if any(lines.values()) else [formatting.TEST_LEFT_OUT if withheld else "No accuracy was recorded."]
    if best is None:
        notes.append("No curve of epsilon: it is not proved.")
    return _section("Accuracy and epsilon", *([body] if drawn else []), *(tag("p", n, kind="soft") for n in notes))


def _comparison(run: Run, best: Guarantee | None) -> Html:
    title = "The honest comparison"
    if best is None:
        return _section(title, tag("p", "No comparison: the epsilon of this run is not proved."))
    twin_ledger = equal_variance(run.planned)
    plain, twin = (guarantee(book, run.delta) for book in (unmixed(run.planned), twin_ledger))
    z = [phase.mechanism.noise_multiplier for phase in twin_ledger.phases]
    multiplier = f", z = {z[0]:.4g}" if len(z) == 1 else ""
    rows = [
        ["this run", up(best.epsilon), best.accountant],
        ["the same noise without mixing", up(plain.epsilon), plain.accountant],
        [f"Gaussian of equal total variance{multiplier}", up(twin.epsilon), twin.accountant],
    ]
    return _section(
        title,
        table(["", f"epsilon at delta = {run.delta!r}", "accountant"], rows, numbers=[1], ours=0),
        tag("p", _verdict(run, best, plain, twin), kind="soft"),
    )


def _verdict(run: Run, best: Guarantee, plain: Guarantee, twin: Guarantee) -> str:
    """What the three lines say, in words."""
    if not any(phase.mechanism.mixed for phase in run.ledger.phases):
        first = "This run does not mix, so the first two lines agree."
    elif best.epsilon < plain.epsilon:
        first = "Mixing lowers epsilon; it also adds variance, which the last line gives to a Gaussian instead."
    else:
        first = "Mixing does not lower the proved epsilon here: it is that of the same noise without mixing."
    second = " Plain DP-SGD with that variance has the smaller epsilon." if twin.epsilon < best.epsilon else ""
    return f"{first}{second} All numbers are upper bounds, by Renyi moments (RDP) or loss distributions (PLD)."


def _phases(run: Run) -> Html:
    rows = [
        [f"{i}", f"{phase.steps:,}", *formatting.mechanism_cells(phase.mechanism)]
        for i, phase in enumerate(run.ledger.phases, start=1)
    ]
    left_out = len(rows) - _FIRST_PHASES - _LAST_PHASES
    if left_out > 0:
        rows[_FIRST_PHASES:-_LAST_PHASES] = [["...", f"{left_out:,} phases more", *["..."] * 6]]
    columns = ["phase", "steps", "law", "z", "omega", "p", "q", "d"]
    note = "Lengths are over the clip: z is the noise, omega the mixing width; p truncates coordinates to c/sqrt(p); "
    note += "q is the Poisson sampling rate; d the trained coordinates where the account uses them."
    return _section(
        "The ledger",
        table(columns, rows, numbers=[1, 3, 4, 5, 6, 7]) if rows else tag("p", "No step was taken."),
        tag("p", note, kind="soft"),
    )


def _guarantee(run: Run, best: Guarantee | None) -> Html:
    if best is None:
        why = tag("p", "No guarantee of differential privacy is proved for this run:")
        return _section("The guarantee", why, bullets(run.unproved), tag("p", formatting.NOTHING_COVERED))
    if math.isinf(best.epsilon):
        return _section("The guarantee", tag("p", formatting.NOTHING_COVERED))
    promise = (
        f"Everything listed as covered keeps ({up(best.epsilon)}, {run.delta!r})-differential privacy. {best.scope}"
    )
    return _section(
        "The guarantee",
        tag("p", promise),
        *(tag("p", note) for note in best.notes),
        tag("h3", "Covered"),
        bullets(COVERED),
        tag("h3", "Not covered"),
        bullets([*best.not_covered, *(f"what is assumed: {line}" for line in best.assumed)]),
    )


def _diagnostics(run: Run, found: dict[str, Any]) -> Html:
    histogram = found.get("norm_histogram")
    clip = formatting.number(run.settings.get("clip"))
    plot = [] if histogram is None else [plots.norms(histogram["edges"], histogram["counts"], clip, _norm(run))]
    return tag(
        "section",
        tag("h2", "Diagnostics"),
        tag("p", coded(formatting.DIAGNOSTICS), kind="mark"),
        *(tag("figure", svg) for svg in plot),
        table(["", "how often", "count"], _clips(found), numbers=[1]),
        table([], _draws(found), numbers=[1]),
        kind="box",
    )


def _norm(run: Run) -> str:
    """The norm in which gradients are clipped; it follows from the law of the noise."""
    return " or ".join(sorted({f"l{phase.mechanism.coordinate_law.norm}" for phase in run.ledger.phases})) or "l2"


def _clips(found: dict[str, Any]) -> list[list[str]]:
    lines = (
        ("samples whose norm was clipped", "clipped", "samples"),
        ("samples with a truncated coordinate", "truncated", "samples"),
        ("truncated coordinates", "truncated_coordinates", "coordinates"),
    )
    return [
        [name, formatting.share(found.get(part), found.get(whole)),
         f"{formatting.count(found.get(part))} of {formatting.count(found.get(whole))}"]
        for name, part, whole in lines
    ]  # fmt: skip


def _draws(found: dict[str, Any]) -> list[list[str]]:
    drawn = found.get("drawn")
    sizes = [formatting.count(size) for size in drawn] if isinstance(drawn, list) and len(drawn) == 3 else ["-"] * 3
    return [
        ["drawn batch size: mean, smallest, largest", " / ".join(sizes)],
        ["empty draws", formatting.count(found.get("empty_draws"))],
        ["samples whose gradient was not finite", formatting.count(found.get("nonfinite"))],
    ]


def _settings(run: Run, public: bool) -> Html:
    known = {"population": run.ledger.population or run.config.get("samples"), "adjacency": run.ledger.adjacency}
    about = {"steps planned" if key == "steps" else key: run.config.get(key, known.get(key)) for key in _ABOUT}
    rows = []
    for name, value in [*about.items(), *_flat("", run.settings)]:
        last = name.rsplit(".", 1)[-1].lower()
        if public and "seed" in last and value is not None:
            value = "set; left out of the public page"
        if run.unproved and "epsilon" in last:
            name = f"{name} (not proved)"
        rows.append([name, _plain(value)])
    return _section("Settings", table(["setting", "value"], rows))


def _flat(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Nested settings as (dotted name, value)."""
    if depth > _DEEPEST:
        yield name, "..."
    elif isinstance(value, dict) and (value or not name):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry, depth + 1)
    elif isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        for i, entry in enumerate(value, start=1):
            yield from _flat(f"{name}.{i}", entry, depth + 1)
    else:
        yield name, value


def _plain(value: object) -> str:
    """A setting as text."""
    if value is None or value in ([], {}, ""):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(entry) for entry in value)
    return str(value)


def _recheck(run: Run) -> Html:
    command = f"`modelmix verify RUN --delta {run.delta!r}`"
    does = (
        "names the rules that were broken" if run.unproved else "recomputes epsilon from the ledger, without the model"
    )
    text = f"{command}, with RUN the folder of this page, {does}."
    return _section("How to re-check", tag("p", coded(text)))


def _section(title: str, *body: Html) -> Html:
    return tag("section", tag("h2", title), *body)
