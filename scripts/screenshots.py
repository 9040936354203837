"""Makes the pictures of ``docs/images``: the dashboard and ``kvtiers top``, of a real server.

    PATH=/folder/with/prometheus:$PATH python scripts/screenshots.py

Starts ``vllm serve`` with a tiny model and kvtiers, sends requests, lets a real Prometheus scrape
the server, and evaluates the dashboard's queries with it. matplotlib sketches the panels, with the
positions, titles, units and legends of ``docs/dashboards/grafana.json``, because Grafana was not
available.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.ports import free_port
from demo.server import VllmServer
from demo.tiny_model import make_llama
from offload.config.kv_transfer_config import transfer_config

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
DASHBOARD = ROOT / "docs/dashboards/grafana.json"
TRAFFIC_S = 90.0
SCRAPE_S = 1
WINDOW = "15s"
"""The interval that takes the place of ``$__rate_interval``."""
DPI = 80
LEGEND_COLUMNS, LEGEND_ROWS = 3, 1.6
FLAGS = (
    *("--enforce-eager", "--block-size=32", "--kv-cache-memory-bytes=8388608"),
    *("--max-model-len=2048", "--prefix-caching-hash-algo=sha256_cbor"),
)
OBSERVED = ROOT / ".cache" / "screenshots.json"
UNITS = {"percentunit": (100.0, "%"), "bytes": (2**-20, " MiB"), "Bps": (2**-20, " MiB/s"),
         "s": (1e3, " ms"), "cps": (1.0, "/s"), "reqps": (1.0, "/s")}  # fmt: skip

Series = tuple[str, list[float], list[float]]
"""Legend, times and values."""


def traffic(server: VllmServer, seconds: float, seed: int) -> None:
    """Simulate users who ask about shared documents, few of which fit into the GPU's cache."""
    draw = random.Random(seed)
    documents = [[draw.randrange(5, 250) for _ in range(1024)] for _ in range(8)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        question = [draw.randrange(5, 250) for _ in range(64)]
        server.complete(draw.choice(documents) + question, max_tokens=4)


@contextlib.contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes a port of this machine; yields its address."""
    targets = [{"targets": [f"127.0.0.1:{target}"]}]
    job = {"job_name": "vllm", "scrape_interval": f"{SCRAPE_S}s", "static_configs": targets}
    rules = {"scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(rules))
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml",
               f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
               "--log.level=error"]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def evaluated(address: str, query: str, legend: str, start: float) -> list[Series]:
    """The series that Grafana would draw for one query."""
    text = query.replace("$__rate_interval", WINDOW)
    text = re.sub(r"\$\{?(?:model|instance)\}?", ".+", text)
    asked = {"query": text, "start": start, "end": time.time(), "step": 2}
    url = f"{address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url) as reply:
        found = json.load(reply)["data"]["result"]
    series = []
    for one in found:
        labels = one["metric"]
        name = legend
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            name = name.replace(f"{{{{{label}}}}}", labels.get(label, ""))
        points = [(float(at) - start, float(value)) for at, value in one["values"]]
        series.append((name, [at for at, _ in points], [value for _, value in points]))
    return series


def record(address: str, start: float) -> dict[str, list[Series]]:
    """All series of every panel, by its id."""
    return {
        str(panel["id"]): [
            series
            for target in panel.get("targets", ())
            for series in evaluated(address, target["expr"], target["legendFormat"], start)
        ]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    }


def draw_stat(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    """The last value of each series, in the colour of its mapping."""
    known = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    axes.set_axis_off()
    for place, (name, _, values) in enumerate(series):
        shown = known.get(f"{values[-1]:g}", {"text": f"{values[-1]:g}", "color": "grey"})
        box = {"facecolor": shown["color"], "boxstyle": "round,pad=0.6", "alpha": 0.7}
        height = 1 - (place + 0.5) / len(series)
        text = f"{name}: {shown['text']}"
        axes.text(0.5, height, text, ha="center", va="center", bbox=box, fontsize=10)


def draw_lines(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    """Lines, or a stack. Series that are always zero are left out."""
    defaults = panel["fieldConfig"]["defaults"]
    factor, unit = UNITS.get(defaults.get("unit", ""), (1.0, ""))
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    lines = [(name, at, [factor * v for v in values]) for name, at, values in series if any(values)]
    if stacked and lines and all(at == lines[0][1] for _, at, _ in lines):
        names = [name for name, *_ in lines]
        axes.stackplot(lines[0][1], *(values for *_, values in lines), labels=names, alpha=0.7)
    else:
        for name, at, values in lines:
            axes.plot(at, values, label=name, linewidth=1)
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"
    )
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if lines:
        axes.legend(
            fontsize=6,
            loc="upper left",
            bbox_to_anchor=(0, -0.12),
            ncols=LEGEND_COLUMNS,
            frameon=False,
        )
    else:
        axes.text(0.5, 0.5, "0", ha="center", transform=axes.transAxes)


def panel_titles(panels: list[dict[str, Any]]) -> str:
    """The titles of all panels, which the picture's metadata contains: a test compares them with
    those of the dashboard."""
    return "; ".join(str(panel["title"]) for panel in panels)


def draw_dashboard(recorded: dict[str, list[Series]], path: Path) -> None:
    """Every panel at its place on the dashboard's grid of 24 columns, with its legend below."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(15, 0.28 * rows), dpi=DPI)
    for panel in panels:
        at = panel["gridPos"]
        left, bottom = (at["x"] + 1.2) / 24, 1 - (at["y"] + at["h"] - 1) / rows
        if panel["type"] == "row":
            figure.text(0.01, bottom - 0.8 / rows, panel["title"], fontsize=12, weight="bold")
            continue
        below = 0.0 if panel["type"] == "stat" else LEGEND_ROWS
        width, height = (at["w"] - 1.5) / 24, (at["h"] - 2 - below) / rows
        axes = figure.add_axes((left, bottom + below / rows, width, height))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        series = recorded[str(panel["id"])]
        if not series:
            axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes)
            axes.set_axis_off()
        else:
            (draw_stat if panel["type"] == "stat" else draw_lines)(axes, panel, series)
    figure.savefig(path, metadata={"Description": panel_titles(panels)})


def draw_terminal(text: str, path: Path) -> None:
    """The output of a command on a terminal of 80 columns."""
    lines = text.rstrip().splitlines()
    figure = Figure(figsize=(8.2, 0.2 * len(lines) + 0.3), dpi=DPI, facecolor="#1e1e1e")
    for number, line in enumerate(lines):
        height = 1 - (number + 1) / (len(lines) + 1)
        figure.text(0.02, height, line, color="#e6e6e6", family="monospace", fontsize=10)
    figure.savefig(path)


def observe(folder: Path) -> dict[str, Any]:
    """Start a server under load; return the series of all panels, and the output of ``top``."""
    tier = {"type": "lmdb", "path": str(folder / "kv"), "capacity": "64MiB", "reserve": 0}
    connector = transfer_config({"cpu": {"capacity": "12MiB"}, "tiers": [tier]})
    model = make_llama(folder / "model")
    log = folder / "server.log"
    with (
        VllmServer(model, log=log, connector=connector, flags=FLAGS) as server,
        prometheus(folder, server.port) as address,
    ):
        start = time.time()
        users = [
            threading.Thread(target=traffic, args=(server, TRAFFIC_S, seed)) for seed in (1, 1, 2)
        ]
        for user in users:
            user.start()
        time.sleep(TRAFFIC_S * 0.8)
        command = [sys.executable, "-m", "offload.cli", "top", f"127.0.0.1:{server.port}"]
        command += ["--once", "--interval", "5"]
        top = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for user in users:
            user.join()
        return {"panels": record(address, start), "top": top}


def main() -> int:
    """Make all pictures; with ``--again`` from what the last run has observed."""
    if "--again" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as name:
            observed = observe(Path(name))
        OBSERVED.parent.mkdir(parents=True, exist_ok=True)
        OBSERVED.write_text(json.dumps(observed))
    observed = json.loads(OBSERVED.read_text())
    IMAGES.mkdir(exist_ok=True)
    draw_dashboard(observed["panels"], IMAGES / "dashboard.png")
    draw_terminal("$ kvtiers top localhost:8000\n\n" + observed["top"], IMAGES / "top.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
