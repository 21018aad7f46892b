"""The page of a run: one file that says what was trained, what it cost in privacy, and what that does not cover.

This module gathers what the page says from the files of the run folder; ``page.html.j2`` says how it looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix._files import write_atomically
from modelmix._format import up
from modelmix.accounting.guarantee import COVERED, SEEDED, Guarantee, guarantee
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.accounting.runs import TEST_METRICS, Claim
from modelmix.errors import ModelMixError
from modelmix.runs import formatting
from modelmix.runs import page_plots as plots
from modelmix.runs.page_data import Run, read_run

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_FIRST_PHASES, _LAST_PHASES = 20, 5  # of a ledger too long to print
_DEEPEST = 8  # level of nested settings
_ABOUT = [
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
]


def write_report(folder: str | Path, *, public: bool = False) -> Path:
    """Write ``report.html`` into a run folder and return its path.

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
    """Render the page as text. Every value is escaped; only the plots, which are made here, are not."""
    return _template().render(_content(run, public))


def _content(run: Run, public: bool) -> dict[str, Any]:
    """Gather everything that the template shows."""
    best = proved(run, public=public)
    finite = best is not None and math.isfinite(best.epsilon)
    drawn, notes = _progress(run, best, public)
    return {
        "text": formatting,
        "name": run.name,
        "about": [str(run.config[key]) for key in ("model", "data", "created") if run.config.get(key)],
        "delta": repr(run.delta),
        "unproved": run.unproved,
        "best": best,
        "banners": list(_banners(run, best)),
        "facts": list(_facts(run, best, public)),
        "plots": drawn,
        "plot_notes": notes,
        "comparison": None if best is None else _comparison(run, best),
        "phases": _phases(run),
        "promise": _promise(run, best) if best is not None and finite else "",
        "covered": COVERED,
        "not_covered": [] if best is None else [*best.not_covered, *(f"what is assumed: {a}" for a in best.assumed)],
        "diagnostics": None if public or run.diagnostics is None else _diagnostics(run, run.diagnostics),
        "settings": list(_settings(run, public)),
    }


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError:
        raise ModelMixError("the page needs jinja2: install it with pip install 'modelmix[report]'.") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["code"] = _code
    return environment.from_string((files("modelmix.runs") / "page.html.j2").read_text(encoding="utf-8"))


def _code(text: str) -> Markup:
    """Escape a text and set what stands between `backquotes` as code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _figure(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)


def proved(run: Run, *, public: bool = False) -> Guarantee | None:
    """Return the guarantee of all that the run planned, with what the run leaves uncovered; None if none is proved."""
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


def _banners(run: Run, best: Guarantee | None) -> Iterator[dict[str, Any]]:
    if best is None:
        yield {"text": formatting.NOT_PROVED, "lines": run.unproved}
    elif math.isinf(best.epsilon):
        yield {"text": formatting.UNBOUNDED, "lines": ()}
    if "seed" not in run.config:
        yield {"text": formatting.SEED_UNKNOWN, "lines": ()}
    elif run.planned.seeded:
        yield {"text": SEEDED, "lines": ()}


def _facts(run: Run, best: Guarantee | None, public: bool) -> Iterator[dict[str, str]]:
    if not _withheld(run, public):
        yield _accuracy_fact(run)
    yield _epsilon_fact(run, best)
    planned = run.planned.steps if "plan" in run.config else run.config.get("steps")
    yield _fact(
        "steps",
        formatting.count(run.ledger.steps),
        "" if planned is None else f"of {formatting.count(planned)} planned",
    )


def _withheld(run: Run, public: bool) -> bool:
    """Return whether what was measured on the test set stays out of the page."""
    return public and not run.test_public


def _accuracy_fact(run: Run) -> dict[str, str]:
    tested, averaged = run.series("test_accuracy"), run.series("ema_accuracy")
    value = f"{100 * tested[-1][1]:.2f} %" if tested else "-"
    return _fact("test accuracy", value, f"of the average (EMA): {100 * averaged[-1][1]:.2f} %" if averaged else "")


def _epsilon_fact(run: Run, best: Guarantee | None) -> dict[str, str]:
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


def _fact(label: str, value: str, note: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _progress(run: Run, best: Guarantee | None, public: bool) -> tuple[list[Markup], list[str]]:
    """Draw accuracy and epsilon over the steps, and say what is not drawn."""
    withheld = _withheld(run, public)
    lines = {} if withheld else {"model": run.series("test_accuracy"), "average (EMA)": run.series("ema_accuracy")}
    drawn = [plots.accuracy(lines)] if any(lines.values()) else []
    curve = None if best is None else plots.epsilon_curve(run.planned, run.delta, best)
    if curve is not None:
        drawn.append(curve)
    notes = [] if any(lines.values()) else [formatting.TEST_LEFT_OUT if withheld else "No accuracy was recorded."]
    if best is None:
        notes.append("No curve of epsilon: it is not proved.")
    return [_figure(svg) for svg in drawn], notes


def _comparison(run: Run, best: Guarantee) -> dict[str, Any]:
    """Compare with the same noise without mixing, and with a Gaussian of the same variance."""
    twin_ledger = equal_variance(run.planned)
    plain, twin = (guarantee(book, run.delta) for book in (unmixed(run.planned), twin_ledger))
    z = [phase.mechanism.noise_multiplier for phase in twin_ledger.phases]
    multiplier = f", z = {z[0]:.4g}" if len(z) == 1 else ""
    rows = [
        ["this run", up(best.epsilon), best.accountant],
        ["the same noise without mixing", up(plain.epsilon), plain.accountant],
        [f"Gaussian of equal total variance{multiplier}", up(twin.epsilon), twin.accountant],
    ]
    return {"rows": rows, "verdict": _verdict(run, best, plain, twin)}


def _verdict(run: Run, best: Guarantee, plain: Guarantee, twin: Guarantee) -> str:
    """Say what the three lines mean."""
    if not any(phase.mechanism.mixed for phase in run.ledger.phases):
        first = "This run does not mix, so the first two lines agree."
    elif best.epsilon < plain.epsilon:
        first = "Mixing lowers epsilon; it also adds variance, which the last line gives to a Gaussian instead."
    else:
        first = "Mixing does not lower the proved epsilon here: it is that of the same noise without mixing."
    second = " Plain DP-SGD with that variance has the smaller epsilon." if twin.epsilon < best.epsilon else ""
    return f"{first}{second} All numbers are upper bounds, by Renyi moments (RDP) or loss distributions (PLD)."


def _phases(run: Run) -> list[list[str]]:
    rows = [
        [f"{i}", f"{phase.steps:,}", *formatting.mechanism_cells(phase.mechanism)]
        for i, phase in enumerate(run.ledger.phases, start=1)
    ]
    left_out = len(rows) - _FIRST_PHASES - _LAST_PHASES
    if left_out > 0:
        rows[_FIRST_PHASES:-_LAST_PHASES] = [["...", f"{left_out:,} phases more", *["..."] * 6]]
    return rows


def _promise(run: Run, best: Guarantee) -> str:
    return f"Everything listed as covered keeps ({up(best.epsilon)}, {run.delta!r})-differential privacy. {best.scope}"


def _diagnostics(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    histogram, clip = found.get("norm_histogram"), formatting.number(run.settings.get("clip"))
    plot = None
    if histogram is not None:
        plot = _figure(plots.norms(histogram["edges"], histogram["counts"], clip, _norm(run)))
    return {"plot": plot, "clips": _clips(found), "draws": _draws(found)}


def _norm(run: Run) -> str:
    """Name the norm in which gradients are clipped; it follows from the law of the noise."""
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


def _settings(run: Run, public: bool) -> Iterator[tuple[str, str]]:
    known = {"population": run.ledger.population or run.config.get("samples"), "adjacency": run.ledger.adjacency}
    about = {"steps planned" if key == "steps" else key: run.config.get(key, known.get(key)) for key in _ABOUT}
    for name, value in [*about.items(), *_flat("", run.settings)]:
        last = name.rsplit(".", 1)[-1].lower()
        if public and "seed" in last and value is not None:
            value = "set; left out of the public page"
        if run.unproved and "epsilon" in last:
            name = f"{name} (not proved)"
        yield name, _plain(value)


def _flat(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Flatten nested settings into (dotted name, value)."""
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
    """Format a setting."""
    if value is None or value in ([], {}, ""):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(entry) for entry in value)
    return str(value)
