"""Widgets driven without a browser: turn a knob, read what is shown."""

import base64
import re
import xml.etree.ElementTree as ET

import pytest

from rawgrad import figures, scenarios, widgets
from rawgrad.widgets import Knobs


def count(number):
    if number == 3:
        raise ValueError("three is <too> much")
    return f'<svg xmlns="http://www.w3.org/2000/svg"><title>{number}</title></svg>', f"the number is {number}"


@pytest.fixture
def knobs():
    return Knobs(count, {"number": [0, 1, 2, 3]})


def test_a_knob_redraws(knobs):
    assert "<title>0</title>" in knobs._picture.value
    knobs.controls["number"].value = 2
    assert "<title>2</title>" in knobs._picture.value
    assert knobs.as_text() == "number: 2\nthe number is 2"


def test_reset_puts_every_knob_back(knobs):
    knobs.controls["number"].value = 2
    reset = next(child for child in knobs.children[0].children if getattr(child, "description", "") == "Reset")
    reset.click()
    assert "<title>0</title>" in knobs._picture.value


def test_an_error_in_a_redraw_shows_its_sentence_and_the_next_turn_goes_on(knobs):
    knobs.controls["number"].value = 3
    assert "ValueError: three is &lt;too&gt; much" in knobs._picture.value
    assert 'role="alert"' in knobs._picture.value
    assert "three is <too> much" in knobs.as_text()
    assert "<img" not in knobs.as_html()
    knobs.controls["number"].value = 1
    assert "<title>1</title>" in knobs._picture.value


def test_the_bundle_says_itself_three_times(knobs):
    bundle = knobs._repr_mimebundle_()
    assert bundle.keys() == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    source = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', bundle["text/html"])[1]
    assert base64.b64decode(source).decode() == knobs._svg
    assert 'alt="0"' in bundle["text/html"]
    assert ">number: 0\nthe number is 0</pre>" in bundle["text/html"]
    assert bundle["text/plain"] == "number: 0\nthe number is 0"


def test_every_state_drawn_ahead_is_the_one_that_the_knobs_draw():
    def draw(letter, number):
        if (letter, number) == ("b", 2):
            raise ValueError("no b2")
        return f"<svg><title>{letter}</title><rect/><rect/></svg>", f"{letter}\n{number}\n\nend"

    shown = Knobs(draw, {"letter": ["a", "b"], "number": [1, 2, 3]})
    data = shown.as_data()
    assert [(knob["name"], knob["options"]) for knob in data["knobs"]] == [("letter", ["a", "b"]), ("number", ["1", "2", "3"])]
    states = iter(data["states"])
    for letter in "ab":
        for number in (1, 2, 3):
            shown.controls["letter"].value, shown.controls["number"].value = letter, number
            said = ["".join(data["pieces"][piece] for piece in part) for part in data["shown"][next(states)]]
            assert said == [shown._svg, shown._table]
    assert len(set(data["pieces"])) == len(data["pieces"])
    assert next(states, None) is None


def test_the_bundle_has_the_states_for_a_page_only_when_asked(knobs, monkeypatch):
    assert "application/vnd.rawgrad.page+json" not in knobs._repr_mimebundle_()
    monkeypatch.setattr(widgets.Shown, "ahead", True)
    assert knobs._repr_mimebundle_()["application/vnd.rawgrad.page+json"] == knobs.as_data()


@pytest.mark.parametrize(("colab", "stock"), [(False, False), (True, True)])
def test_stock_display_is_off_but_on_colab(colab, stock):
    """ipywidgets 7 shows itself by _ipython_display_, past the bundle; what Colab prefers nobody has seen."""
    import subprocess
    import sys

    code = "import sys, types\n" + ("sys.modules['google.colab'] = types.ModuleType('c')\n" if colab else "")
    code += "from rawgrad.widgets import Shown; print('_ipython_display_' in vars(Shown))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not stock)


def test_a_title_cannot_break_out_of_its_attribute():
    shown = Knobs(lambda n: ('<svg><title>a "b" &lt;c&gt;</title></svg>', "t"), {"n": [1, 2]})
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in shown.as_html()


def test_few_short_options_are_buttons_and_others_a_dropdown():
    shown = Knobs(lambda *v: ("<svg/>", ""), {"few": [1, 2, 3], "many": list(range(9)), "long": ["a" * 20, "b" * 20]})
    assert [type(control).__name__ for control in shown.controls.values()] == ["ToggleButtons", "Dropdown", "Dropdown"]


def test_no_slider_and_no_radio_button():
    """A slider's handle has no accessible name, and radio buttons do not answer the arrow keys."""
    from pathlib import Path

    assert not re.search(r"Slider|RadioButtons|Output\(|interact", Path(widgets.__file__).read_text())


def test_a_value_holds_a_knob_and_a_list_narrows_it():
    shown = widgets.version_timeline(before=["nothing", "view(64)"], writer="a kernel", repair="none", hook="none", backwards=3)
    assert list(shown.controls) == ["before the Function"]
    assert "silent and wrong" in shown.as_text()
    shown.controls["before the Function"].value = "view(64)"
    assert "raises at backward 3" in shown.as_text()


def test_free_play_has_every_knob():
    shown = widgets.version_timeline()
    assert [list(c.options) for c in shown.controls.values()] == [
        [(str(v), v) for v in values]
        for values in (scenarios.BEFORE, scenarios.WRITERS, scenarios.REPAIRS, scenarios.HOOKS, range(4))
    ]


@pytest.mark.parametrize("writer", scenarios.WRITERS)
def test_every_state_can_be_drawn(writer):
    """Whatever stands before the Function, under every repair: a picture, and another one for each."""
    shown = widgets.version_timeline(writer=writer, backwards=2)
    drawn = set()
    for before in scenarios.BEFORE:
        for repair in scenarios.REPAIRS:
            for control, value in (("before the Function", before), ("repair", repair)):
                shown.controls[control].value = value
            ET.fromstring(shown._svg)
            drawn.add(shown._svg)
    assert len(drawn) == len(scenarios.BEFORE) * len(scenarios.REPAIRS)


def test_the_rotary_strip_has_rotarys_knobs():
    shown = widgets.rotary_strip()
    assert [list(dict(control.options)) for control in shown.controls.values()] == [
        list(scenarios.ROTARY_CONSUMERS), list(scenarios.ROTARY_READINGS), list(scenarios.KERNELS),
    ]  # fmt: skip
    assert "shape (1, 2, 2, 2), strides (8, 2, 4, 1)" in shown.as_text()


def test_the_memory_widgets_have_their_knobs():
    shown = widgets.siblings()
    assert [list(dict(control.options)) for control in shown.controls.values()] == [
        [*scenarios.BESIDE, scenarios.RESIDUAL], list(scenarios.ORDERS), list(scenarios.BACKWARDS), list(scenarios.KERNELS),
    ]  # fmt: skip
    shown.controls["made first"].value = "P"
    assert "silent and wrong: c.grad is 10 20 30" in shown.as_text()
    shown = widgets.memory_meter()
    assert [list(dict(control.options)) for control in shown.controls.values()] == [
        list(scenarios.WAYS), list(scenarios.SITUATIONS), list(scenarios.KERNELS),
    ]  # fmt: skip
    shown.controls["way to save"].value = "in place"
    shown.controls["situation"].value = "a sibling"
    assert "in place; a sibling: silent and wrong: a gradient is 6 where 4 is right" in shown.as_text()


def test_a_backend_that_is_missing_is_said_where_the_picture_was(monkeypatch):
    from rawgrad import runtime

    monkeypatch.setattr(runtime, "HAS_TRITON", False)
    shown = widgets.version_timeline(
        writer=["torch in place", "the Triton kernel"], before="nothing", repair="none", hook="none"
    )
    shown.controls["who writes"].value = "the Triton kernel"
    assert "RuntimeError: Triton is not installed here" in shown._picture.value


def test_a_knob_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="there is no knob 'befor'; there are before, writer, repair, hook, backwards"):
        widgets.version_timeline(befor="nothing")
    with pytest.raises(ValueError, match="backwards is one of 0, 1, 2, 3, got 4"):
        widgets.version_timeline(backwards=4)


def test_lanes_come_in_their_order():
    shown = widgets.gradient_path(before="view(64)", writer="a kernel")
    assert "takes it over" in shown.as_text()
    assert "X.grad lies in" not in widgets.version_timeline(lanes=figures.LANES[:2]).as_text()
