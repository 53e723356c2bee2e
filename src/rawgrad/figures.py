"""Draws plain records: an SVG string, with a table that says the same in text.

Every picture paints its own white ground and names its font, so that it can stand in an <img> on a dark page. A colour never
stands alone: beside it is a letter, a hatch or a word. No addresses: storages are A, B, C.
"""

from collections.abc import Mapping, Sequence
from html import escape

from rawgrad.scenarios import MOST_BACKWARDS, RESIDUAL, Backward, GradientPath, Graph, Saving, Siblings, Strip, Timeline

LANES = ("versions", "values", "memory")

# Okabe and Ito's colours, which stay apart for colour-blind eyes
_ORANGE, _SKY, _WHITE, _GREY = "#E69F00", "#56B4E9", "#FFFFFF", "#EEEEEE"
_WIDTH = 960


# The alphabet of all pictures


def _svg(height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'style="max-width:100%;height:auto" role="img" font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="18">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{_WIDTH}" height="{height}" fill="{_WHITE}"/>{"".join(body)}</svg>'
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", bold: bool = False, halo: bool = False) -> str:
    """`words` with their baseline at y; a halo keeps them legible on a hatch."""
    weight = ' font-weight="bold"' if bold else ""
    edge = f' stroke="{_WHITE}" stroke-width="5" paint-order="stroke" stroke-linejoin="round"' if halo else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}{edge}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str = _WHITE, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="#000" '
        f'stroke-width="1.5"{dashes}/>'
    )


def _hatched(*corners: tuple[float, float], fill: str = _ORANGE, kind: str = "hatch", ink: str = "#000") -> str:
    """A convex shape that stands out without its colour. Its lines are drawn one by one: a <pattern> is found by its id, and
    of two pictures on one page with the same id the hidden one can win, which leaves the shape empty."""
    strokes = []
    sums = [x + y for x, y in corners]
    for c in range(int(min(sums)) + 6, int(max(sums)), 12):  # where x + y = c crosses the outline
        crossings = []
        for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
            before, after = x1 + y1 - c, x2 + y2 - c
            if before * after < 0:
                part = before / (before - after)
                crossings.append(f"{x1 + part * (x2 - x1):.0f} {y1 + part * (y2 - y1):.0f}")
        strokes.append("M" + "L".join(crossings))
    outline = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return (
        f'<polygon points="{outline}" fill="{fill}" stroke="#000" stroke-width="1.5"/>'
        f'<path class="{kind}" d="{"".join(strokes)}" stroke="{ink}" stroke-width="1.2"/>'
    )


def _cell(x: float, y: float, width: float, height: float, words: str, wrong: bool, dashed: bool = False) -> str:
    """A box with words in it, hatched and bold where they tell of something wrong."""
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
    box = _hatched(*corners) if wrong else _box(x, y, width, height, dashed=dashed)
    return box + _text(x + width / 2, y + height / 2 + 6, words, bold=wrong, halo=wrong)


def _triangle(x: float, y: float, counted: bool) -> str:
    """A write to the saved tensor; full where it was counted."""
    corners = ((x - 17, y - 14), (x + 17, y - 14), (x, y + 17))
    if not counted:
        return _hatched(*corners)
    return f'<polygon points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}" stroke="#000" stroke-width="1.5"/>'


def _line(*points: tuple[float, float], width: float = 1.5, dashed: bool = False, arrow: bool = False) -> str:
    dashes = ' stroke-dasharray="3 5"' if dashed else ""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="#000" stroke-width="{width:g}"{dashes}/>'
    if arrow:  # its head, for a line that ends to the right
        x, y = points[-1]
        line += f'<polygon points="{x:g},{y:g} {x - 11:g},{y - 6:g} {x - 11:g},{y + 6:g}"/>'
    return line


def _chain(names: Sequence[str], widths: Sequence[float], fills: Sequence[str]) -> tuple[list[str], list[float]]:
    """Boxes in a row with arrows between them, and the x of their middles."""
    gap = (_WIDTH - 24 - sum(widths)) / (len(names) - 1)
    centres = [12 + sum(widths[:i]) + gap * i + width / 2 for i, width in enumerate(widths)]
    body = []
    for name, x, width, fill in zip(names, centres, widths, fills, strict=True):
        body += [_box(x - width / 2, 52, width, 44, fill), _text(x, 80, name)]
    for i in range(len(names) - 1):
        ends = (centres[i] + widths[i] / 2 + 2, 74), (centres[i + 1] - widths[i + 1] / 2 - 2, 74)
        body.append(_line(*ends, arrow=True))
    return body, centres


def _number(value: float) -> str:
    return "none" if value != value else f"{value:g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """`rows` of text in columns, the first row a heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


# The version timeline

_LEFT, _FIRST, _COLUMN = 190, 285, 218  # where the forward begins, and the first backward; how wide a backward is
_CHECK, _WRITE, _ARRIVE = 34, 102, 170  # where in a backward's column
_CELL = _COLUMN - 24


def version_timeline(record: Timeline, lanes: Sequence[str] = LANES) -> tuple[str, str]:
    """Versions, values and memory over the backwards of `record`.

    Args:
        lanes: which of LANES to draw, in the order of the lesson.

    Returns:
        The picture and its table.
    """
    draw = {"versions": _versions_lane, "values": _values_lane, "memory": _memory_lane}
    experiment = _experiment(record)
    body = [_text(12, 28, _verdict(record, lanes), "start", bold=True)]
    body += [_text(12, 54 + 26 * i, words, "start") for i, words in enumerate(experiment)]
    head = 66 + 26 * len(experiment)
    body.append(_text(_LEFT + 40, head, "forward", bold=True))
    body += [_text(_FIRST + (i + 0.5) * _COLUMN, head, f"backward {i + 1}", bold=True) for i in range(MOST_BACKWARDS)]
    top = head + 14
    for lane in lanes:
        drawn, height = draw[lane](record, top)
        body += [_line((10, top), (_WIDTH - 10, top), width=0.75), *drawn]
        top += height
    columns = (_FIRST + i * _COLUMN for i in range(MOST_BACKWARDS))
    body += [_line((x, head + 14), (x, top), width=0.75, dashed=True) for x in columns]
    body.append(_line((10, top), (_WIDTH - 10, top), width=0.75))
    legend, height = _legend(lanes, top + 10)
    return _svg(top + 10 + height, _title(record, lanes), [*body, *legend]), _timeline_table(record, lanes)


def _verdict(record: Timeline, lanes: Sequence[str]) -> str:
    """Whether it raised, and whether it was right where the values are shown."""
    return record.verdict if "values" in lanes else record.verdict.partition(" and ")[0].partition(":")[0]


def _experiment(record: Timeline) -> list[str]:
    """The knobs in words, in one line or two."""
    changes = [f"repair: {record.repair}"] if record.repair != "none" else []
    changes += [f"a hook {record.hook}"] if record.hook != "none" else []
    return [f"{record.writer} writes, {record.before} before the Function", *(["; ".join(changes)] if changes else [])]


def _title(record: Timeline, lanes: Sequence[str] = LANES) -> str:
    return f"Version timeline. {'; '.join(_experiment(record))}. {len(record.backwards)} backwards: {_verdict(record, lanes)}."


def _versions_lane(record: Timeline, top: float) -> tuple[list[str], float]:
    """The counter of the saved tensor as a staircase, autograd's checks and the writes above it."""
    marks, floor, step = top + 36, top + 114, 26
    level = record.backwards[0].version_at_save if record.backwards else 0
    base, points, body = level, [(_LEFT + 40, floor)], []
    numbers = [(_LEFT + 40, level)]
    for i, backward in enumerate(record.backwards):
        start = _FIRST + i * _COLUMN
        for at, version in (
            (_CHECK, backward.version_found),
            (_WRITE, backward.version_written),
            (_ARRIVE, backward.version_left),
        ):
            if version != level:
                points += [(start + at, floor - step * (level - base)), (start + at, floor - step * (version - base))]
                numbers.append((start + at + 16, version))
                level = version
        body += _marks(backward, start, marks)
    end = _FIRST + len(record.backwards) * _COLUMN - 8 if record.backwards else _FIRST - 20
    body = [_line(*points, (end, floor - step * (level - base)), width=4), *body]
    body += [_text(x, floor - step * (version - base) - 9, str(version), bold=True, halo=True) for x, version in numbers]
    body += [_text(12, marks + 6, "check and writes", "start"), _text(12, floor + 4, "version of saved x", "start")]
    return body, 138


def _marks(backward: Backward, start: float, y: float) -> list[str]:
    """Check, write and arrival of one backward."""
    check, write, arrive = start + _CHECK, start + _WRITE, start + _ARRIVE
    if backward.raised:
        return [
            f'<circle cx="{check:g}" cy="{y:g}" r="17" fill="{_ORANGE}" stroke="#000" stroke-width="2.5"/>',
            _text(check, y + 7, "≠", bold=True),
            _text(check + 26, y + 6, "raises", "start", bold=True),
        ]
    body = [
        f'<circle cx="{check:g}" cy="{y:g}" r="15" fill="{_WHITE}" stroke="#000" stroke-width="1.5"/>',
        _text(check, y + 6, "="),
    ]
    if backward.write != "none":
        body.append(_triangle(write, y, backward.write == "counted"))
    if backward.arrival == "added":
        body += [_box(arrive - 14, y - 14, 28, 28), _text(arrive, y + 6, "+", bold=True)]
    return body


def _values_lane(record: Timeline, top: float) -> tuple[list[str], float]:
    body = [_text(12, top + 34, "X[0, 0]", "start"), _text(12, top + 84, "X.grad[0, 0]", "start")]
    body += [_box(_LEFT + 4, top + 10, 72, 36), _text(_LEFT + 40, top + 34, "1"), _text(_LEFT + 40, top + 84, "none")]
    for i, backward in enumerate(record.backwards):
        left = _FIRST + i * _COLUMN + 12
        changed, wrong = backward.x != 1, backward.grad != backward.right_grad
        gradient = f"{backward.grad:g}, right: {backward.right_grad:g}" if wrong else f"{backward.grad:g}, right"
        body += [
            _cell(left, top + 10, _CELL, 36, f"{backward.x:g}, at first 1" if changed else "1", changed),
            _cell(left, top + 60, _CELL, 36, "not computed" if backward.raised else gradient, wrong and not backward.raised,
                  dashed=backward.raised),
        ]  # fmt: skip
    return body, 108


def _memory_lane(record: Timeline, top: float) -> tuple[list[str], float]:
    body = [_text(12, top + 38, "X lies in", "start"), _text(12, top + 82, "X.grad lies in", "start")]
    body += [_box(_LEFT + 16, top + 16, 48, 32, _SKY), _text(_LEFT + 40, top + 39, "A"), _text(_LEFT + 40, top + 83, "none")]
    for i, backward in enumerate(record.backwards):
        left, middle = _FIRST + i * _COLUMN + 12, _FIRST + (i + 0.5) * _COLUMN
        if backward.grad_is_x:
            body += [
                _box(left, top + 16, _CELL, 76, _SKY),
                _text(middle, top + 39, "A"),
                _text(middle, top + 83, "A, the same"),
            ]
        else:
            body += [_box(left, top + 16, _CELL, 32, _SKY), _text(middle, top + 39, "A")]
            body += [_box(left, top + 60, _CELL, 32), _text(middle, top + 83, "B, its own")]
    return body, 104


def _legend(lanes: Sequence[str], top: float) -> tuple[list[str], float]:
    """What the marks mean, for the lanes that are drawn."""
    if "versions" not in lanes:
        return [], 4
    y = top + 18
    return [
        f'<circle cx="26" cy="{y}" r="13" fill="{_WHITE}" stroke="#000" stroke-width="1.5"/>',
        _text(26, y + 6, "="),
        _text(46, y + 6, "version check", "start"),
        _triangle(213, y, counted=False),
        _text(236, y + 6, "write, not counted", "start"),
        _triangle(445, y, counted=True),
        _text(468, y + 6, "write, counted", "start"),
        _box(630, y - 12, 24, 24),
        _text(642, y + 6, "+", bold=True),
        _text(664, y + 6, "added into X.grad, counted", "start"),
    ], 44


def _timeline_table(record: Timeline, lanes: Sequence[str]) -> str:
    done = record.backwards
    rows = [["", "forward", *(f"backward {i + 1}" for i in range(len(done)))]]
    if "versions" in lanes:
        rows += [
            ["version check", "", *(f"{b.version_at_save} {'≠' if b.raised else '='} {b.version_found}" for b in done)],
            ["write to saved x", "", *(b.write for b in done)],
            ["version of saved x", *_versions(record)],
        ]
    if "values" in lanes:
        rows += [
            ["X[0, 0]", "1", *(_number(b.x) for b in done)],
            ["X.grad[0, 0]", "none", *("raises" if b.raised else _number(b.grad) for b in done)],
            ["right", "", *(_number(b.right_grad) for b in done)],
        ]
    if "memory" in lanes:
        rows += [
            ["returned gradient", "", *(b.arrival for b in done)],
            ["X.grad lies in", "none", *("A, with X" if b.grad_is_x else "B, its own" for b in done)],
        ]
    return f"{'; '.join(_experiment(record))}: {_verdict(record, lanes)}\n{table(rows)}"


def _versions(record: Timeline) -> list[str]:
    first = record.backwards[0].version_at_save if record.backwards else 0
    return [str(first), *(str(b.version_left) for b in record.backwards)]


# The autograd graph, backward


def gradient_path(record: GradientPath) -> tuple[str, str]:
    """The way of one gradient from dy to X.grad, and whose memory it lies in; the picture and its table."""
    names = [*(stop.node for stop in record.stops), "AccumulateGrad", "X.grad"]
    widths = [max(20 + 11 * len(name), 148) if 0 < i < len(names) - 1 else 76 for i, name in enumerate(names)]
    fills = [_fill(record.stops[0].storage), *[_GREY] * (len(names) - 2), _fill(record.grad.storage)]
    chain, centres = _chain(names, widths, fills)
    body = [_text(12, 30, "The gradient of one backward, on its way to X.grad", "start", bold=True), *chain]
    for stop, x, width in list(zip(record.stops, centres, widths, strict=False))[1:]:  # what each node hands on
        body += [
            _line((x, 96), (x, 118), dashed=True),
            _box(x - width / 2, 118, width, 56, _fill(stop.storage)),
            _text(x, 141, f"memory {stop.storage}"),
            _text(x, 164, stop.tensor),
        ]
    outcome = "takes it over" if record.taken_over else "copies it"
    body += [_text(centres[-2], 141, outcome, bold=True)]
    tenants = _tenants(record)
    left = 12
    longest = [max(len(f"memory {letter}"), *map(len, who)) for letter, who in tenants.items()]
    for (letter, who), letters in zip(tenants.items(), longest, strict=True):
        block = 56 + (_WIDTH - 24 - 56 * len(tenants)) * letters / sum(longest)
        body += [
            _box(left + 4, 206, block - 8, 44 + 26 * len(who), _fill(letter)),
            _text(left + 20, 234, f"memory {letter}", "start", bold=True),
            *(_text(left + 20, 260 + 26 * i, name, "start") for i, name in enumerate(who)),
        ]
        left += block
    height = 206 + 44 + 26 * max(map(len, tenants.values())) + 14
    title = f"Path of the gradient with {record.before} before the Function. AccumulateGrad {outcome}."
    rows = [["step", "hands on", "in memory"]]
    rows += [[s.node, s.tensor, s.storage] for s in record.stops]
    rows += [["AccumulateGrad", outcome, ""], ["X.grad", "", record.grad.storage]]
    return _svg(height, title, body), f"{record.before} before the Function\n{table(rows)}"


def _fill(letter: str) -> str:
    return _SKY if letter == "A" else _WHITE  # whose memory is X's


def _tenants(record: GradientPath) -> dict[str, list[str]]:
    """Who lies in which memory, A first."""
    tenants = {"A": ["X"]}
    tenants.setdefault(record.saved.storage, []).append("what f saved")
    for stop in record.stops:
        who = "dy" if stop.node == "dy" else f"what {stop.node} returned"
        tenants.setdefault(stop.storage, []).append(who)
    tenants.setdefault(record.grad.storage, []).append("X.grad")
    return dict(sorted(tenants.items()))


# The memory strip

_CELLS, _SHOWN = 8, 32  # cells in a row, and in all


def memory_strip(record: Strip) -> tuple[str, str]:
    """A storage as cells: above each, at which of its steps Python reads it; below, at which the kernel does.

    Returns:
        The picture and its table. A storage of more than 32 elements is drawn in part, and the picture says so.
        Cells outside dy's own storage are hatched in grey.
    """
    reach = max((*record.python, *record.kernel), default=0) + 1
    drawn = min(len(record.values), _SHOWN, -(-reach // _CELLS) * _CELLS)
    python, kernel = _steps(record.python, drawn), _steps(record.kernel, drawn)
    wrong = {place for place, bad in zip(record.kernel, record.wrong, strict=False) if bad}
    lines = _strip_lines(record, drawn)
    body = [_text(12, 32, _strip_heading(record), "start", bold=True)]
    body += [_text(12, 58 + 26 * i, line, "start", bold=i == 0 and bool(record.kernel)) for i, line in enumerate(lines)]
    width, left, y = 98, 164, 50 + 26 * len(lines)
    for first in range(0, drawn, _CELLS):
        row = range(first, min(first + _CELLS, drawn))
        body += [_text(12, y + 20, "Python reads", "start"), _text(12, y + 60, f"memory[{first}]", "start")]
        for x, place in zip(range(left, _WIDTH, width), row, strict=False):
            outside = place >= record.own
            corners = ((x, y + 30), (x + width, y + 30), (x + width, y + 78), (x, y + 78))
            body.append(_hatched(*corners, fill=_GREY, kind="outside", ink="#999") if outside else _box(x, y + 30, width, 48))
            body.append(_text(x + width / 2, y + 60, f"{record.values[place]:.3g}", halo=outside))
            if python[place]:
                body.append(_text(x + width / 2, y + 20, python[place]))
            if kernel[place]:
                body.append(_cell(x + 4, y + 84, width - 8, 30, kernel[place], place in wrong))
        read = any(kernel[place] for place in row)
        body += [_text(12, y + 104, "kernel reads", "start")] if read else []
        y += 124 if read else 90
    title = f"Memory strip. {_strip_heading(record)}. {lines[0]}."
    rows = [["step", "Python reads", "value", *(["kernel reads", "value", ""] if record.kernel else [])]]
    for i, place in enumerate(record.python):
        rows.append([str(i + 1), f"memory[{place}]", f"{record.values[place]:.3g}"])
        if record.kernel:
            rows[-1] += [f"memory[{record.kernel[i]}]", f"{record.reads[i]:.3g}", "wrong" if record.wrong[i] else ""]
    said = [f"{_strip_heading(record)}: {lines[0]}", *([_COPIED] if record.copied else []), table(rows)]
    return _svg(y + 4, title, body), "\n".join(said)


def _steps(places: Sequence[int], drawn: int) -> list[str]:
    """For each place, the steps at which it is read, counted from 1: "3", "1, 4", or "1 to 6" for a run."""
    steps = [[step for step, read in enumerate(places, 1) if read == place] for place in range(drawn)]
    run = [len(s) > 2 and s[-1] - s[0] == len(s) - 1 for s in steps]
    return [f"{s[0]} to {s[-1]}" if r else ", ".join(map(str, s)) for s, r in zip(steps, run, strict=True)]


def _strip_heading(record: Strip) -> str:
    return f"{record.what}: shape {record.shape}, strides {record.stride}, offset {record.offset}"


_COPIED = "The kernel reads a copy, in its order. Its numbers say which cell of dy each element came from."
_READS = {
    "right": "right",
    "other cells": "wrong: the kernel reads other cells",
    "wrong order": "wrong: the kernel reads in another order",
}


def _strip_lines(record: Strip, drawn: int) -> list[str]:
    lines = [f"Python prints {_numbers(record.prints)}"]
    if record.kernel:
        repair = "" if record.repair == "none" else f"{record.repair}: "
        lines = [f"{repair}{_READS[record.verdict]}", *lines, f"kernel reads {_numbers(record.reads)}"]
        if record.copied:
            lines.append(_COPIED)
    if record.own < drawn:
        lines.append(f"dy's own storage has {_elements(record.own)}. The grey cells lie behind it.")
    elif drawn < record.own:
        lines.append(f"The storage has {record.own} elements; {drawn} are drawn.")
    return lines


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _numbers(values: Sequence[float]) -> str:
    return "  ".join(f"{value:.3g}" for value in values)


# The graph of three nodes


def graph(record: Graph) -> tuple[str, str]:
    """loss = (X * X).sum() with what its backward leaves of it; the picture and its table."""
    names, widths = ["loss", "SumBackward", "MulBackward", "AccumulateGrad", "X.grad"], [76, 160, 160, 176, 96]
    chain, centres = _chain(names, widths, [_WHITE, _GREY, _GREY, _GREY, _WHITE])
    body = [_text(12, 30, "Backward goes from the loss to the leaf", "start", bold=True), *chain]
    saved = "saved X, twice" if record.saved == "kept" else "freed"
    grad = "None" if record.grad is None else f"{record.grad:g}"
    body += [
        _line((centres[2], 96), (centres[2], 116), dashed=True),
        _cell(centres[2] - 84, 116, 168, 36, saved, wrong=False, dashed=record.saved == "freed"),
        _text(centres[4], 140, grad, bold=True),
    ]
    said = [f"{record.done} of {record.backwards} backwards done, retain_graph={record.retain_graph}"]
    said += ["The next one raised: what mul saved was freed."] if record.raised else []
    body += [_text(12, 190 + 26 * i, line, "start", bold=i > 0) for i, line in enumerate(said)]
    title = f"Graph of three nodes. {'. '.join(said)}. What mul saved: {record.saved}. X.grad: {grad}."
    rows = [["backwards done", "what mul saved", "X.grad"], [str(record.done), record.saved, grad]]
    return _svg(236, title, body), "\n".join([*said, table(rows)])


# Who holds this gradient


def siblings(record: Siblings) -> tuple[str, str]:
    """Two branches that are given one dy, in the order of their turns; the picture and its table. A is dy's memory."""
    said = _siblings_lines(record)
    body = [_text(12, 30 + 26 * i, line, "start", bold=i == 0) for i, line in enumerate(said)]
    top, right = 44 + 26 * len(said), (1.0, 2.0, 3.0)
    rows = [["turn", "branch", "finds in dy", "leaves in dy"]]
    for turn, branch in enumerate(record.branches, 1):
        wrote, late = branch.left != branch.found, branch.found != right
        does = f"writes A: {_spaced(branch.left)}" if wrote else f"reads A: {_spaced(branch.found)}"
        name = "f" if branch.name == "f" else f"P = {record.beside}"
        body += [
            _text(12, top + 28, f"turn {turn}", "start"),
            _box(90, top, 190, 44, _GREY), _text(185, top + 28, name),
            _line((282, top + 22), (322, top + 22), arrow=True),
            _cell(324, top, 230, 44, does, wrote or late),
        ]  # fmt: skip
        rows.append([str(turn), name, _spaced(branch.found), _spaced(branch.left)])
        top += 58
    body.append(_text(12, top + 28, "in the end", "start"))
    left = 130
    cells = [(f"w: {_spaced(record.w)}", record.w != right, True)]
    for leaf, (got, want) in record.grads.items():
        cells.append((f"{leaf}.grad: {_spaced(got)}", got != want, leaf in record.in_dy))
    for words, wrong, in_dy in cells:
        body += [
            _cell(left, top, 240, 44, words, wrong),
            _text(left + 120, top + 68, "in A" if in_dy else "in memory of its own"),
        ]
        left += 262
    top += 84
    holders = "; ".join(record.holders)
    body += [
        _box(12, top, _WIDTH - 24, 44, _SKY),
        _text(28, top + 28, f"When f runs, A is also used by: {holders}.", "start"),
    ]
    title = f"Who holds this gradient. {'. '.join(said)}. When f runs, dy's memory is also used by: {holders}."
    rows += [["end", words.partition(":")[0], words.partition(": ")[2], "wrong" if wrong else ""] for words, wrong, _ in cells]
    return _svg(top + 58, title, body), "\n".join([*said, f"when f runs, dy's memory is also used by: {holders}", table(rows)])


def _siblings_lines(record: Siblings) -> list[str]:
    if record.beside == RESIDUAL:
        made = "z = h + f(h), where h = 5 * a"
    else:
        order = "f(a)" if record.first == "f(a)" else record.beside
        made = f"z = f(a) + {record.beside}; {order} was made first"
    repair = "f doubles dy in place" if record.repair == "none" else f"f: {record.repair}"
    return [record.verdict, f"{made}. w = 1 2 3. {repair}"]


def _spaced(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


# The memory meter


def memory_meter(record: Saving) -> tuple[str, str]:
    """Memory of one way to save, in boxes of N, with what becomes of the gradient; the picture and its table."""
    verdict = f"{_JUDGED[record.verdict]}{': ' if record.because else ''}{record.because}"
    body = [
        _text(12, 30, f"{record.way}; {record.situation}", "start", bold=True),
        _cell(12, 44, _WIDTH - 24, 40, verdict, record.verdict == "silent"),
    ]
    phases = {"most in forward": record.forward, "in between": record.kept, "most in backward": record.backward}
    for row, (phase, boxes) in enumerate(phases.items()):
        y, most = 100 + 56 * row, boxes == record.peak
        body.append(_text(12, y + 29, phase, "start", bold=most))
        for i in range(boxes):
            body += [_box(204 + 56 * i, y, 52, 44, _SKY if most else _WHITE), _text(230 + 56 * i, y + 29, "N")]
        body.append(_text(216 + 56 * boxes, y + 29, f"{boxes} N, the peak" if most else f"{boxes} N", "start", bold=most))
    rows = [["", "N"], *([phase, str(boxes)] for phase, boxes in phases.items())]
    title = f"Memory meter. {record.way}, {record.situation}. Peak {record.peak} N. {verdict}."
    return _svg(276, title, body), f"{record.way}; {record.situation}: {verdict}\n{table(rows)}"


_JUDGED = {"right": "right", "loud": "loud", "silent": "silent and wrong"}


def peaks(records: Mapping[str, Sequence[Saving]]):
    """Peak memory of one backward by way, with the worst verdict over the situations on the bar; matplotlib Axes.

    Args:
        records: way -> its records, that of one backward first.
    """
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(9.6, 0.45 * len(records) + 1), layout="constrained")
    worst = {
        "silent": ("silent and wrong somewhere", _ORANGE, "//"),
        "loud": ("right or loud", _WHITE, ""),
        "right": ("right", _SKY, ""),
    }
    for name, ways in records.items():
        verdict = next(v for v in worst if any(way.verdict == v for way in ways))
        words, colour, hatch = worst[verdict]
        (bar,) = axes.barh(name, ways[0].peak, color=colour, edgecolor="black", hatch=hatch)
        axes.bar_label(axes.containers[-1], [f" {bar.get_width():g} N: {words}"], fontsize=12)
    axes.invert_yaxis()
    axes.set_xlabel("peak of one backward, in sizes N of x", fontsize=12)
    axes.tick_params(labelsize=12)
    axes.set_xlim(0, 1.6 * max(ways[0].peak for ways in records.values()))
    axes.spines[["top", "right"]].set_visible(False)
    return axes
