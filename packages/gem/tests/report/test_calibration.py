"""The figure of calibration over seeds: it says what its dots are."""

import json

from html_page import read_json

from gem.report.calibration import reliability_figure
from gem.report.compare import group_runs
from gem.report.read import read_run


def test_dots_are_means_only_where_seeds_have_the_same_groups(runs, copy):
    seeds = [read_run(runs / name) for name in ("one", "two")]
    figure = reliability_figure(group_runs(seeds), "progressive", "click")
    assert figure.text.endswith("Each dot is the mean over the seeds.")
    found = read_json(copy / "diagnostics.json")
    del found["reliability"]["progressive"]["click"]["all"]["groups"][-1]
    (copy / "diagnostics.json").write_text(json.dumps(found))
    alone = reliability_figure(group_runs([read_run(copy)]), "progressive", "click")
    figure = reliability_figure(group_runs([read_run(copy), seeds[1]]), "progressive", "click")
    assert figure.text.endswith("Of seeds whose groups differ in number, the first one is shown.")
    assert figure.rows == alone.rows
