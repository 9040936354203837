"""The pictures of ``docs/images``: each is on a page, and each is made by a script."""

from __future__ import annotations

import json

from PIL import Image

from tests.scripts import load_script
from tests.test_docs import PAGES, ROOT

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
