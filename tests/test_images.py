"""The pictures of the pages: each of ``docs/images`` is on a page and made by a script; those of
``bench/results``, and the numbers beside them, show the runs that are kept there."""

from __future__ import annotations

import calendar
import json
import re
from typing import Any

from PIL import Image

from tests.scripts import load_script
from tests.test_docs import PAGES, ROOT

RESULTS = ROOT / "bench/results"
IMAGES = sorted((ROOT / "docs/images").iterdir())


def test_every_image_is_on_a_page_and_has_a_script() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.py")]
    assert IMAGES
    for image in IMAGES:
        assert any(f"images/{image.name})" in text for text in texts), image.name
        assert any(image.name in text for text in scripts), image.name


def test_the_serving_chart_shows_the_kept_run() -> None:
    script = load_script("draw_serving_chart")
    run = json.loads(script.RUN.read_text(encoding="utf-8"))
    measured = {row["series"] for row in run["rows"] if row["case"] != "does not run here"}
    left, right = script.draw().axes
    for axes, name in zip((left, right), script.PANELS, strict=True):
        assert {shown.get_label() for shown in axes.containers} == measured
        for shown in axes.containers:
            rows = [row for row in run["rows"] if row["series"] == shown.get_label()]
            values = [row["values"][name] for row in rows]
            assert sorted(shown.lines[0].get_ydata()) == sorted(values)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"commit `{run['environment']['commit']}`" in readme


def test_the_dashboards_picture_has_all_its_panels() -> None:
    script = load_script("screenshots")
    panels = json.loads(script.DASHBOARD.read_text(encoding="utf-8"))["panels"]
    with Image.open(ROOT / "docs/images/dashboard.png") as picture:
        shown = picture.info.get("Description")
    assert shown == script.panel_titles(panels), "run scripts/screenshots.py"


def test_the_serving_chart_shows_intervals() -> None:
    values = [{"values": {"tokens/s": 10.0}, "intervals": {"tokens/s": (8.0, 11.0)}},
              {"values": {"tokens/s": 10.0}}]  # fmt: skip
    reach = load_script("draw_serving_chart").reach_of(values, "tokens/s")
    assert reach == [[2.0, 0.0], [1.0, 0.0]]


def chapter(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def line_of_each_row(runs: list[Any]) -> list[str]:
    """The rows of the guide's table of look-ahead, from the kept runs."""
    columns = []
    for run in runs:
        notes = "\n".join(run["notes"])
        with_and_without = re.search(
            r"TTFT mean: with look-ahead (\S+) of that without \(95% interval (\S+) to (\S+)\), "
            r"lower in (\d of \d) rounds",
            notes,
        )
        bound = re.search(r"gets the mean TTFT much below (\S+) of", notes)
        assert with_and_without
        assert bound
        ratio, low, high, rounds = with_and_without.groups()
        rows = {row["series"]: row["values"] for row in run["rows"]}
        to_cpu = [
            [rows[series][f"TTFT mean {name}"] for name in ("ratio", "low", "high")]
            for series in ("all on disk, look-ahead", "all on disk, default options")
        ]
        ahead, default = ("{:.2f} ({:.2f} to {:.2f})".format(*values) for values in to_cpu)
        columns.append(
            (
                f"{float(ratio):.2f} ({float(low):.2f} to {float(high):.2f})",
                f"in {rounds} rounds",
                ahead,
                f"{float(bound[1]):.2f}",
                default,
            )
        )
    return [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]


def test_the_table_of_look_ahead_shows_the_kept_runs() -> None:
    names = ("backlog-of-12-prompts-of-768-tokens", "backlog-of-8-prompts-of-2048-tokens")
    runs = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    text = chapter("docs/guides/look-ahead.md", "What look-ahead gained")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert [f"bench/results/{name}.md)" in table[0] for name in names] == [True, True]
    shown = ["|" + line.partition("|")[2].partition("|")[2] for line in table[1:]]
    assert shown == line_of_each_row(runs)
    for run in runs:
        assert all(words in text for words in told_of(run)[:2]), told_of(run)


def told_of(run: Any) -> tuple[str, str, str]:
    """Day, processor and commit of a run, as a page names them."""
    environment = run["environment"]
    year, month, day = environment["date"].partition(" ")[0].split("-")
    processor = re.sub(r"\(R\)| Processor", "", environment["cpu"])
    date = f"{int(day)} {calendar.month_name[int(month)]} {year}"
    return date, processor, f"commit `{environment['commit']}`"


def plots() -> list[tuple[str, str, str]]:
    """Page, run, and caption of each plot of a kept run."""
    plot = re.compile(r"!\[([^\]]{20,})\]\(\S*bench/results/([\w-]+)\.png\)\n\n(.+?)\n\n", re.S)
    return [
        (page.name, name, " ".join(caption.split()))
        for page in PAGES
        for _, name, caption in plot.findall(page.read_text(encoding="utf-8"))
    ]


def test_every_plot_of_a_kept_run_says_where_it_was_made() -> None:
    embedded = sum(
        len(re.findall(r"bench/results/[\w-]+\.png\)", page.read_text(encoding="utf-8")))
        for page in PAGES
    )
    assert embedded == len(plots()) >= 3, "a plot without a text or a caption"
    for page, name, caption in plots():
        fitting = (path for path in RESULTS.glob("*.json") if name.startswith(path.stem))
        run = max(fitting, key=lambda path: len(path.stem))
        told = told_of(json.loads(run.read_text(encoding="utf-8")))
        assert [words for words in told if words not in caption] == [], page
        assert f"bench/results/{run.stem}.md)" in caption, page
