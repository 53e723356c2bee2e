"""Pictures say what the records say, alone and on any page."""

import functools
import re
import xml.etree.ElementTree as ET
from itertools import product

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from rawgrad import figures, scenarios

SVG = "{http://www.w3.org/2000/svg}"
RUNS = [
    scenarios.version_timeline(before, writer, repair, hook, backwards)
    for before, writer, repair, hook, backwards in [
        ("nothing", "a kernel", "none", "none", 0),
        ("nothing", "a kernel", "none", "none", 3),
        ("view(64)", "a kernel", "none", "none", 3),
        ("view(2, 4, 8).view(8, 8)", "the CUDA kernel", "declare with custom_op", "prints the gradient", 3),
        ("nothing", "torch in place", "none", "none", 2),
        ("clone()", "a kernel", "none", "keeps the gradient", 3),
    ]
]
TIMELINES = [figures.version_timeline(run, lanes) for run in RUNS for lanes in (("versions",), ("values",), figures.LANES)]
STRIPS = [
    figures.memory_strip(scenarios.memory_strip(consumer, repair))
    for consumer in scenarios.CONSUMERS
    for repair in scenarios.READINGS
] + [figures.memory_strip(scenarios.view_strip(view)) for view in scenarios.VIEWS]
STRIPS += [
    figures.memory_strip(scenarios.rotary_strip(consumer, repair))
    for consumer in scenarios.ROTARY_CONSUMERS
    for repair in scenarios.ROTARY_READINGS
]
GRAPHS = [figures.graph(scenarios.graph(retain, backwards)) for retain in (False, True) for backwards in (0, 1, 2)]
PATHS = [
    figures.gradient_path(scenarios.gradient_path(before, repair=repair))
    for before in scenarios.BEFORE
    for repair in scenarios.REPAIRS
]
SIBLINGS = [
    figures.siblings(scenarios.siblings(beside, first, repair))
    for beside in (*scenarios.BESIDE, scenarios.RESIDUAL)
    for first in scenarios.ORDERS
    for repair in scenarios.BACKWARDS
]
SAVINGS = [scenarios.saving(way, situation) for way in scenarios.WAYS for situation in scenarios.SITUATIONS]
ALL = TIMELINES + PATHS + STRIPS + GRAPHS + SIBLINGS + [figures.memory_meter(saving) for saving in SAVINGS]


def words(svg: str) -> list[str]:
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("svg", [svg for svg, _ in ALL])
def test_every_picture_can_stand_alone(svg):
    root = ET.fromstring(svg)
    width, height = (float(root.get(side)) for side in ("width", "height"))
    assert root.find(f"{SVG}title").text
    assert root.get("role") == "img"
    assert "sans-serif" in root.get("font-family")
    assert float(root.get("font-size")) >= 18
    ground = root.find(f"{SVG}rect")
    assert (ground.get("fill"), float(ground.get("width")), float(ground.get("height"))) == ("#FFFFFF", width, height)
    assert "id=" not in svg, "ids of two pictures on one page can meet"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@functools.cache
def width_of(text: str, bold: bool) -> float:
    """Pixels that `text` takes at 18 px in the font that pictures ask for first, which matplotlib ships."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=18)
    return TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]


@pytest.mark.parametrize("svg", [svg for svg, _ in ALL])
def test_nothing_is_clipped_and_no_letters_leave_their_box(svg):
    root = ET.fromstring(svg)
    width, height = (float(root.get(side)) for side in ("width", "height"))
    boxes = []
    for box in list(root.iter(f"{SVG}rect"))[2:]:
        x, y, w, h = (float(box.get(k)) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        boxes.append((x, y, w, h))
    for text in root.iter(f"{SVG}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        wide = width_of(text.text, bold=text.get("font-weight") is not None)
        left = x - wide / 2 if text.get("text-anchor") == "middle" else x
        assert left >= 0, text.text
        assert left + wide <= width, text.text
        assert 18 <= y <= height - 4, text.text
        around = [b for b in boxes if b[0] <= x <= b[0] + b[2] and b[1] <= y <= b[1] + b[3]]
        for bx, _, bw, _ in around:
            assert left >= bx, text.text
            assert left + wide <= bx + bw, text.text


def test_the_timeline_shows_every_number_of_its_record():
    for run, lanes in product(RUNS, [figures.LANES]):
        svg, table = figures.version_timeline(run, lanes)
        drawn = words(svg)
        for number, backward in enumerate(run.backwards, 1):
            assert f"backward {number}" in table
            assert (f"{backward.x:g}, at first 1" if backward.x != 1 else "1") in drawn
            right = backward.grad == backward.right_grad
            if not backward.raised:
                assert (f"{backward.grad:g}, right" if right else f"{backward.grad:g}, right: {backward.right_grad:g}") in drawn
        assert drawn.count("raises") == drawn.count("≠") == sum(b.raised for b in run.backwards)
        assert drawn.count("=") == sum(not b.raised for b in run.backwards) + 1  # and once in the legend
        wrong = sum((b.x != 1) + (b.grad != b.right_grad and not b.raised) for b in run.backwards)
        uncounted = sum(b.write == "not counted" for b in run.backwards)
        assert svg.count('class="hatch"') == wrong + uncounted + 1  # and once in the legend
        assert run.verdict in svg
        assert run.verdict in table
    versions_only, table = figures.version_timeline(RUNS[1], ("versions",))
    assert "wrong" not in versions_only + table, "what is not shown is not judged"


def test_lanes_are_drawn_in_the_order_that_is_asked_for():
    run = RUNS[1]
    assert "X.grad lies in" not in words(figures.version_timeline(run, ("versions", "values"))[0])
    drawn = words(figures.version_timeline(run, ("memory", "versions"))[0])
    assert drawn.index("X.grad lies in") < drawn.index("version of saved x")


def test_the_path_shows_whose_memory_it_is():
    svg, table = figures.gradient_path(scenarios.gradient_path("view(64)"))
    assert "takes it over" in words(svg)
    assert [line.split()[-1] for line in table.splitlines() if line.startswith("X.grad")] == ["A"]
    svg, table = figures.gradient_path(scenarios.gradient_path("nothing"))
    assert {"copies it", "X itself"} <= set(words(svg))


def test_a_strip_marks_the_reads_that_the_record_says():
    for consumer in scenarios.CONSUMERS:
        for repair in ("none", "dy.clone()", "strides to the kernel"):
            strip = scenarios.memory_strip(consumer, repair)
            svg, table = figures.memory_strip(strip)
            wrong = {place for place, bad in zip(strip.kernel, strip.wrong, strict=True) if bad}
            assert svg.count('class="hatch"') == len(wrong)
            assert sum(line.endswith("wrong") for line in table.splitlines()) == sum(strip.wrong)
            said = words(svg)
            assert "Python prints " + "  ".join(f"{v:.3g}" for v in strip.prints) in said
            assert "kernel reads " + "  ".join(f"{v:.3g}" for v in strip.reads) in said
            assert (figures._COPIED in said) == (figures._COPIED in table) == strip.copied
            verdict = "right" if repair == "none" else f"{repair}: right"
            assert (verdict in said) == (strip.verdict == "right")


def test_a_strip_tells_of_grey_cells_where_some_are_drawn():
    for consumer, grey in (("(cat([y, z], 3) * w).sum()", False), ("(y * w).sum()", False), ("y.sum()", True)):
        svg, _ = figures.memory_strip(scenarios.rotary_strip(consumer))
        assert ("grey cells" in svg) == ('class="outside"' in svg) == grey
        assert ("are drawn" in svg) is False


def test_a_strip_says_at_which_step_a_cell_is_read():
    said = words(figures.memory_strip(scenarios.memory_strip("y.sum()"))[0])
    assert "1 to 6" in said
    said = words(figures.memory_strip(scenarios.view_strip("m[0].expand(3, 4)"))[0])
    assert {"1, 5, 9", "2, 6, 10", "3, 7, 11", "4, 8, 12"} <= set(said)
    assert "kernel reads" not in said


@pytest.mark.parametrize(
    ("consumer", "own"), [("y.sum()", 1), ("y.sum(0).mean()", 3), ("(y.t() * w).sum()", 6), ("(cat([y, z], 1) * w).sum()", 12)]
)
def test_cells_outside_dys_own_storage_are_hatched_in_grey(consumer, own):
    svg, _ = figures.memory_strip(scenarios.memory_strip(consumer))
    drawn = 8 if own < 8 else 16
    assert svg.count('class="outside"') == drawn - own
    assert any(f"storage has {own} element" in line for line in words(svg))
    assert 'class="outside"' not in figures.memory_strip(scenarios.view_strip("m"))[0]


def test_a_large_storage_is_drawn_in_part_and_says_so():
    svg, _ = figures.memory_strip(scenarios.memory_strip("stack([y, z, ...], -1)[..., 0].sum()"))
    assert "The storage has 48 elements; 32 are drawn." in words(svg)


def test_the_graph_shows_what_is_freed():
    assert {"freed", "The next one raised: what mul saved was freed.", "6"} <= set(
        words(figures.graph(scenarios.graph(False, 2))[0])
    )
    assert {"saved X, twice", "12"} <= set(words(figures.graph(scenarios.graph(True, 2))[0]))


def test_no_colour_stands_alone():
    """Every filled mark holds, or lies beside, a word, a letter or a hatch: no colour but these is used at all."""
    for svg, _ in ALL:
        fills = set(re.findall(r'fill="([^"]+)"', svg))
        assert fills <= {"#FFFFFF", "#000", "none", "#E69F00", "#56B4E9", "#EEEEEE"}


def test_a_table_lines_up():
    assert figures.table([["", "a"], ["long name", "1"]]) == "           a\nlong name  1"


def test_a_memory_meter_shows_as_many_boxes_as_there_are_n():
    for saving in SAVINGS:
        svg, table = figures.memory_meter(saving)
        assert words(svg).count("N") == saving.forward + saving.kept + saving.backward
        assert ('class="hatch"' in svg) == (saving.verdict == "silent")
        assert f"{saving.peak} N, the peak" in words(svg)
        assert saving.because in table


def test_siblings_hatch_what_is_wrong():
    for first, hatched in (
        ("f(a)", ["writes A: 2 4 6", "w: 2 4 6"]),
        ("P", ["writes A: 2 4 6", "reads A: 2 4 6", "w: 2 4 6", "c.grad: 10 20 30"]),
    ):
        svg, table = figures.siblings(scenarios.siblings("5 * c", first))
        found = re.findall(r'class="hatch"[^>]*/><text[^>]*>([^<]*)<', svg)
        assert found == hatched
        assert "5 * c" in table
    svg, _ = figures.siblings(scenarios.siblings("5 * c", "P", "new memory"))
    assert 'class="hatch"' not in svg


def test_the_plot_of_peaks_says_every_verdict_in_words():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    ways = ("new memory", "in place", "in place, one shot")
    axes = figures.peaks({way: [s for s in SAVINGS if s.way == way] for way in ways})
    assert [text.get_text().strip() for text in axes.texts] == [
        "3 N: right", "2 N: silent and wrong somewhere", "2 N: right or loud",
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ways)
    pyplot.close(axes.figure)
