"""Knobs that run a scenario and show its figure.

What a cell shows says itself three times: live, as an <img> with its table for readers of a saved or untrusted notebook, and
as text. A knob holds all the state there is, so every state can also be drawn ahead, for a page without a kernel.
"""

import base64
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape

import ipywidgets

from rawgrad import figures, scenarios

_VIEW = "application/vnd.jupyter.widget-view+json"
_PAGE = "application/vnd.rawgrad.page+json"
_BUTTONS_UP_TO = 4  # options; more, or longer ones, go into a dropdown
_BUTTON_LETTERS = 26


class Shown(ipywidgets.VBox):
    """A widget that also says itself in HTML and in text, where no widget can be shown."""

    if "google.colab" not in sys.modules:
        _ipython_display_ = None  # ipywidgets 7 would show itself by this, past the bundle below
    ahead = False  # True, set on this class: the bundle has a fourth part, for `make html`

    def as_html(self) -> str:
        raise NotImplementedError

    def as_text(self) -> str:
        raise NotImplementedError

    def as_data(self) -> dict:
        """What a page without a kernel needs in order to show this in each of its states."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_formats) -> dict:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        bundle = {_VIEW: view, "text/html": self.as_html(), "text/plain": self.as_text()}
        return {**bundle, _PAGE: self.as_data()} if self.ahead else bundle


class Knobs(Shown):
    """Controls over a picture.

    Args:
        draw: (one value of every knob) -> (svg, table), pure. What it raises is shown where the picture was.
        knobs: name -> the values that it can take, the first one at the start. Their str is what a reader sees.
    """

    def __init__(self, draw: Callable[..., tuple[str, str]], knobs: Mapping[str, Sequence]):
        self._draw = draw
        self.controls = {name: _control(name, options) for name, options in knobs.items()}
        reset = ipywidgets.Button(description="Reset", tooltip="Put every knob back where it was", layout={"width": "auto"})
        reset.on_click(lambda _: self.reset())
        row = {"flex_flow": "row wrap", "align_items": "flex-end", "grid_gap": "2px 20px"}
        self._picture = ipywidgets.HTML()
        super().__init__([ipywidgets.Box([*self.controls.values(), reset], layout=row), self._picture])
        for control in self.controls.values():
            control.observe(lambda _: self._redraw(), names="value")
        self._redraw()

    def reset(self) -> None:
        """Put every knob back to its first value."""
        for control in self.controls.values():
            control.value = control.options[0][1]

    def _drawn(self, *values) -> tuple[str, str]:
        """Picture and table; no picture, and the sentence of the error, where there is one."""
        try:
            return self._draw(*values)
        except Exception as problem:  # an observer's exception would show nowhere
            return "", f"{type(problem).__name__}: {problem}"

    def _redraw(self) -> None:
        self._svg, self._table = self._drawn(*(control.value for control in self.controls.values()))
        alert = f'<p role="alert" style="{_PLAIN}"><b>{escape(self._table)}</b></p>'
        self._picture.value = self._svg or alert

    def as_html(self) -> str:
        picture = ""
        if self._svg:
            title = self._svg.partition("<title>")[2].partition("</title>")[0].replace('"', "&quot;")
            packed = base64.b64encode(self._svg.encode()).decode()
            picture = f'<img alt="{title}" style="max-width:100%" src="data:image/svg+xml;base64,{packed}">'
        table = f'<pre style="white-space:pre;overflow-x:auto">{escape(self.as_text())}</pre>'
        return f"{picture}{table}<p><small>Run this cell for live knobs.</small></p>"

    def as_text(self) -> str:
        knobs = "; ".join(f"{name}: {control.value}" for name, control in self.controls.items())
        return f"{knobs}\n{self._table}"

    def as_data(self) -> dict:
        """Every state drawn ahead. Thousands of pictures share their pieces, so each piece is there once.

        `states` counts through the knobs as nested loops do, the last knob innermost, and gives each state's place in `shown`:
        the pieces of the picture, then those of the table.
        """
        pieces, shown = {}, {}

        def numbered(whole: str, between: str) -> tuple[int, ...]:
            return tuple(pieces.setdefault(piece, len(pieces)) for piece in whole.replace(between, f"{between}\0").split("\0"))

        def drawn(values) -> tuple:
            svg, table = self._drawn(*values)
            return numbered(svg, "/>"), numbered(table, "\n")

        every = itertools.product(*([value for _, value in control.options] for control in self.controls.values()))
        states = [shown.setdefault(drawn(values), len(shown)) for values in every]
        knobs = [
            {"name": name, "options": [label for label, _ in control.options], "buttons": hasattr(control, "button_style")}
            for name, control in self.controls.items()
        ]
        return {"knobs": knobs, "states": states, "shown": list(shown), "pieces": list(pieces)}


_PLAIN = "background:#fff;color:#000;border:2px solid #000;padding:0.5em;line-height:1.4"


def _control(name: str, options: Sequence) -> ipywidgets.Widget:
    pairs = [(str(option), option) for option in options]
    letters = sum(len(label) for label, _ in pairs)
    kind = ipywidgets.ToggleButtons if len(pairs) <= _BUTTONS_UP_TO and letters <= _BUTTON_LETTERS else ipywidgets.Dropdown
    control = kind(options=pairs, value=pairs[0][1], description=name, layout={"width": "auto"})
    control.style.description_width = "initial"
    if kind is ipywidgets.ToggleButtons:
        control.style.button_width = "auto"
    return control


def _knobs(draw: Callable[..., tuple[str, str]], names: Mapping[str, tuple[str, Sequence]], given: Mapping) -> Knobs:
    """Knobs for the parameters in `names`: all the values of each, the list that is given for it, or none where one is."""
    for name, value in given.items():
        if name not in names:
            raise TypeError(f"there is no knob {name!r}; there are {', '.join(names)}")
        for one in value if isinstance(value, list) else [value]:
            scenarios.known(name, one, names[name][1])
    fixed = {name: value for name, value in given.items() if not isinstance(value, list)}
    live = {name: given.get(name, options) for name, (_, options) in names.items() if name not in fixed}
    return Knobs(
        lambda *values: draw(**fixed, **dict(zip(live, values, strict=True))),
        {names[name][0]: options for name, options in live.items()},
    )


def version_timeline(lanes: Sequence[str] = figures.LANES, **given) -> Knobs:
    """The version timeline, live.

    Args:
        lanes: which of figures.LANES to draw.
        given: parameters of scenarios.version_timeline: a value holds it, a list makes it a knob over the list. Every
            other one is a knob over all its values.
    """
    for lane in lanes:
        scenarios.known("a lane", lane, figures.LANES)
    names = {
        "before": ("before the Function", list(scenarios.BEFORE)),
        "writer": ("who writes", list(scenarios.WRITERS)),
        "repair": ("repair", list(scenarios.REPAIRS)),
        "hook": ("a hook on X", list(scenarios.HOOKS)),
        "backwards": ("backwards", list(range(scenarios.MOST_BACKWARDS + 1))),
    }
    return _knobs(lambda **knobs: figures.version_timeline(scenarios.version_timeline(**knobs), lanes), names, given)


def memory_strip(**given) -> Knobs:
    """The memory strip, live: consumer, repair and kernel. `given` as for version_timeline."""
    return _strip(scenarios.memory_strip, scenarios.CONSUMERS, scenarios.READINGS, given)


def rotary_strip(**given) -> Knobs:
    """The memory strip of the rotary embedding, live; `given` as for version_timeline."""
    return _strip(scenarios.rotary_strip, scenarios.ROTARY_CONSUMERS, scenarios.ROTARY_READINGS, given)


def _strip(scenario: Callable, consumers: Mapping, repairs: Mapping, given: Mapping) -> Knobs:
    names = {
        "consumer": ("what follows y", list(consumers)),
        "repair": ("repair", list(repairs)),
        "writer": ("kernel", list(scenarios.KERNELS)),
    }
    return _knobs(lambda **knobs: figures.memory_strip(scenario(**knobs)), names, given)


def view_strip(**given) -> Knobs:
    """Python's reads of a view, live."""
    names = {"view": ("view", list(scenarios.VIEWS))}
    return _knobs(lambda **knobs: figures.memory_strip(scenarios.view_strip(**knobs)), names, given)


def graph(**given) -> Knobs:
    """The graph of three nodes, live."""
    names = {"retain_graph": ("retain_graph", [False, True]), "backwards": ("backwards", [0, 1, 2])}
    return _knobs(lambda **knobs: figures.graph(scenarios.graph(**knobs)), names, given)


def gradient_path(**given) -> Knobs:
    """The way of a gradient through the graph, live; `given` as for version_timeline."""
    names = {
        "before": ("before the Function", list(scenarios.BEFORE)),
        "writer": ("who writes", list(scenarios.WRITERS)),
        "repair": ("repair", list(scenarios.REPAIRS)),
    }
    return _knobs(lambda **knobs: figures.gradient_path(scenarios.gradient_path(**knobs)), names, given)


def siblings(**given) -> Knobs:
    """Who holds this gradient, live: order, what stands beside, repair; `given` as for version_timeline."""
    names = {
        "beside": ("P, beside f", [*scenarios.BESIDE, scenarios.RESIDUAL]),
        "first": ("made first", list(scenarios.ORDERS)),
        "repair": ("repair", list(scenarios.BACKWARDS)),
        "writer": ("kernel", list(scenarios.KERNELS)),
    }
    return _knobs(lambda **knobs: figures.siblings(scenarios.siblings(**knobs)), names, given)


def memory_meter(**given) -> Knobs:
    """The memory meter, live: way and situation; `given` as for version_timeline."""
    names = {
        "way": ("way to save", list(scenarios.WAYS)),
        "situation": ("situation", list(scenarios.SITUATIONS)),
        "writer": ("kernel", list(scenarios.KERNELS)),
    }
    return _knobs(lambda **knobs: figures.memory_meter(scenarios.saving(**knobs)), names, given)
