"""Samples per second and memory of clipped sums of per-sample gradients: ModelMix, its peers, and ordinary training.

pip install opacus jax                # to compare with; what is not installed is left out
python benchmarks/throughput.py [--cases resnet20 transformer] [--out FILE.json] [--chart FILE.svg] [--quick]
python benchmarks/throughput.py --chart-only FILE.json [MORE.json] --chart FILE.svg

Every system runs in this one process, on the same random samples at the same weights. A private step clips every
sample's gradient to the norm c and adds them up, without noise; ModelMix with p = 100 truncates coordinates as well. An
ordinary step is a backward pass of the mean loss. Each system is first set up alone, which gives its peak of memory
above what was in use before it, samples not counted, and "ready_s", the time until its first step is done. Its sum is
compared with that of torch.func in float32, and a setting in which it comes out wrong is not used. Then all take turns,
so that what else the machine does meets them alike, and the median counts.

Torch peers get bfloat16 parameters and samples, for images the faster of two memory layouts, and where they are
compiled the faster of with and without CUDA graphs; where bfloat16 fails, autocast, then float32. ModelMix is given
float32 samples and parameters, as in training, and converts within the step. Results are written after every
measurement.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

# Read when torch is imported: threads that spin while they wait measure the other programs of a machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import chart
import torch
from cases import CASES, QUICK, Problem
from measure import Running, collect, flatness, line, ratios, set_up, take_turn, touch, usable
from peers import COMPILED, GRAPHS, SYSTEMS
from rich.console import Console
from rich.table import Table

FLAT = {"resnet20": (768, 1536, 3072, 6144)}  # batches whose memory is compared
CPU_SHARE, QUICK_BATCH = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--batch", type=int, help="samples in a step (default: by case; fewer on a processor)")
    parser.add_argument("--chunk", type=int, nargs="+", help="samples ModelMix holds at once; of several, the fastest")
    parser.add_argument("--vmap-chunk", type=int, nargs="+", help="likewise for the peers built on vmap")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="first choice (default: by device)")
    parser.add_argument(
        "--modes", nargs="+", choices=GRAPHS, default=list(GRAPHS), help="of torch.compile, the fastest"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one measurement")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="earlier results to keep beside the new ones")
    parser.add_argument("--chart", type=Path, help="where the chart goes, .svg and .png")
    parser.add_argument("--chart-only", type=Path, nargs="+", metavar="JSON", help="measure nothing, draw these")
    options = parser.parse_args()
    if options.chart_only:
        found = merged(options.chart_only)
        show(found)
        draw(found, options.chart or options.chart_only[0].with_suffix(".svg"))
        return
    warnings.filterwarnings("ignore")
    found = run(options)
    if options.chart:
        draw(found, options.chart)


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    tune(device)
    found = {
        "machine": machine(device),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {
            name: getattr(options, name)
            for name in ("batch", "chunk", "vmap_chunk", "precision", "turns", "seconds", "quick", "device")
        },
        "cases": merged(options.add)["cases"] if options.add else {},
    }
    for name in options.cases:
        found["cases"][name] = {"systems": {}}
        try:
            measure_case(found, name, device, options)
        except Exception as error:
            found["cases"][name]["error"] = line(error)
            save(found, options.out)
        show({**found, "cases": {name: found["cases"][name]}})
        torch._dynamo.reset()
        collect_quietly(device)
        if not usable(device):
            print("the accelerator is lost after an error: nothing more can be measured.", file=sys.stderr)
            break
    return found


def measure_case(found: dict[str, Any], name: str, device: torch.device, options: argparse.Namespace) -> None:
    case = (QUICK if options.quick else CASES)[name]
    batch = options.batch or (case.batch if device.type == "cuda" else max(8, case.batch // CPU_SHARE))
    batch = options.batch or QUICK_BATCH if options.quick else batch
    report = found["cases"][name]
    tell(f"{name}: the right sums of {batch} samples")
    problem = Problem(case, batch, device)
    report |= {
        "batch": batch,
        "sample": list(case.shape),
        "parameters": problem.parameters,
        "clip": problem.clip,
        "quick": options.quick,
        "date": found["date"],
        "settings": found["settings"],
    }
    chunks = {
        "chunk": options.chunk or [case.chunk],
        "vmap_chunk": options.vmap_chunk or [case.vmap_chunk],
        "batch": [batch],
    }
    if options.quick:  # several chunks, of which one has to be filled up
        chunks |= {kind: [min(*chunks[kind], max(1, batch - 3))] for kind in ("chunk", "vmap_chunk")}
    running: dict[str, Running] = {}
    first = options.precision or ("bfloat16" if device.type == "cuda" else "float32")

    def keep(system: str, error: Exception | None = None) -> None:
        if error is not None:
            report["systems"][system] = {**report["systems"].get(system, {}), "error": line(error)}
            running.pop(system, None)
        else:
            report["systems"][system] = running[system].record()
        report["ratios"] = ratios(report["systems"])
        save(found, options.out)

    for system in options.systems:
        tell(f"{name}: setting up {system}")
        what = SYSTEMS[system]
        precisions = what.precisions[what.precisions.index(first) :]
        try:
            running[system] = set_up(problem, what, precisions, chunks[what.holds], options.modes, options.seconds)
            keep(system)
        except Exception as error:
            keep(system, error)
        collect_quietly(device)
        if not usable(device):
            return
    for turn in range(options.turns):
        tell(f"{name}: turn {turn + 1} of {options.turns}")
        for system in list(running):
            try:
                take_turn(problem, running[system])
                keep(system)
            except Exception as error:
                keep(system, error)
    if COMPILED in running and len(running[COMPILED].turns) > 1:
        turns = running[COMPILED].turns
        report["drift"] = turns[-1] / turns[0] - 1
    mine = next((system for system in running if SYSTEMS[system].kind == "ours"), None)
    if name in FLAT and mine and device.type == "cuda":
        tell(f"{name}: memory by batch")
        report["memory_by_batch"] = {"system": mine, "rows": flatness(problem, running[mine], list(FLAT[name]))}
    save(found, options.out)


def tune(device: torch.device) -> None:
    """What anyone who cares for speed would set."""
    for limit in ("recompile_limit", "cache_size_limit"):  # one process compiles the same functions for many cases
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    touch(device)


def collect_quietly(device: torch.device) -> None:
    try:
        collect(device)
    except Exception as error:  # a lost accelerator is reported by who asks for it next
        print(line(error), file=sys.stderr)


def tell(text: str) -> None:
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def merged(paths: list[Path]) -> dict[str, Any]:
    """Several results as one; where a case is in more than one file, the last counts."""
    found: dict[str, Any] = {"cases": {}}
    for path in paths:
        more = json.loads(path.read_text(encoding="utf-8"))
        found = {**more, "cases": {**found["cases"], **more["cases"]}}
    return found


def save(found: dict[str, Any], path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")  # whoever ends this in the middle of writing leaves the last whole file
        draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def draw(found: dict[str, Any], path: Path) -> None:
    for written in chart.draw(found, path):
        print(f"drawn: {written}")


def show(found: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name, case in found["cases"].items():
        size = f"{case['parameters']:,} parameters, batch {case['batch']:,}" if "batch" in case else ""
        table = Table(title=f"{name}: {size}", title_justify="left", caption_justify="left")
        table.add_column("system", no_wrap=True)
        for column in ("samples/s", "least - most", "peak GiB", "ready s", "chunk", "off by"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("precision, layout; notes")
        for system, row in case["systems"].items():
            table.add_row(system, *cells(row))
        parts = [f"{system}: {told(row)}" for system, row in case.get("ratios", {}).items() if isinstance(row, dict)]
        if case.get("ratios", {}).get("best_peer"):
            parts.append(f"best peer: {case['ratios']['best_peer']}")
        if "drift" in case:
            parts.append(f"{COMPILED}, last turn to first: {case['drift']:+.1%}")
        if "memory_by_batch" in case:
            rows = case["memory_by_batch"]["rows"]
            peaks = ", ".join(f"{row['batch']}: {row.get('peak_gib', float('nan')):.3f}" for row in rows)
            parts.append(f"peak GiB by batch, {case['memory_by_batch']['system']}: {peaks}")
        if "error" in case:
            parts.append(case["error"])
        table.caption = "\n".join(parts)
        console.print(table)


def cells(row: dict[str, Any]) -> list[str]:
    if "samples_per_second" not in row:
        return ["-"] * 6 + [row["error"]]
    how = ", ".join(str(row[key]) for key in ("precision", "layout", "mode") if row.get(key))
    notes = [how, *(row[key] for key in ("note", "error") if row.get(key))]
    return [
        f"{row['samples_per_second']:,.0f}",
        f"{row['least']:,.0f} - {row['most']:,.0f}",
        f"{row['peak_gib']:.2f}" if "peak_gib" in row else "",
        f"{row['ready_s']:.1f}",
        f"{row['chunk']:,}",
        f"{row['distance']:.1e}" if "distance" in row else "",
        "; ".join(notes),
    ]


def told(row: dict[str, float]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in row.items())


def machine(device: torch.device) -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else []
    names = [text.split(":")[1].strip() for text in lines if text.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
    }


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in ("modelmix", "torch", "triton", "opacus", "jax", "jaxlib"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(package)
            if module is not None:
                out[package] = str(getattr(module, "__version__", "?"))
    return out


if __name__ == "__main__":
    main()
