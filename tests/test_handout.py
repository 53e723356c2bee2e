"""The handout: one page, nothing cut off, the PDF says what the HTML says, and every line of code on it has been run."""

import ast
import html
import os
import re
import sys
import zlib
from pathlib import Path

import pytest
import torch
from conftest import CHROMIUM
from torch.autograd.function import once_differentiable
from torch.autograd.gradcheck import GradcheckError

import rawgrad
from rawgrad import scenarios, specimens

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import handout  # noqa: E402

TEXT = handout.HTML.read_text()
CODE = {
    name: html.unescape(code)
    for name, code in re.findall(r'<(?:code|pre) data-run="(\w+)">(.*?)</(?:code|pre)>', TEXT, re.DOTALL)
}


# Code


def run(code: str, **names):
    """Run `code`; the value of its last expression. `names` is what it sees."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    names = {"torch": torch, "grad": torch.autograd.grad, **names}
    exec(compile(tree, "handout", "exec"), names)
    return eval(compile(ast.Expression(last.value), "handout", "eval"), names) if last else names


def of(function, *rest):
    """The call of a specimen with the arguments behind x that it wants."""
    return lambda x: function.apply(x, *(rest or (None,)))


def leaf(*shape, **kinds):
    return torch.ones(*(shape or (2, 3)), requires_grad=True, device=rawgrad.runtime.DEVICE, **kinds)


def prints(f, capsys):
    x = leaf()
    w = torch.arange(1.0, 7.0, device=x.device).view(3, 2)
    y = f(x)
    run(CODE["strides"], y=y)
    (y.t() * w).sum().backward()
    return capsys.readouterr().out


def transposed(f):
    """A consumer that hands back strides (1, 2)."""
    w = torch.arange(1.0, 7.0, device=rawgrad.runtime.DEVICE).view(3, 2)
    return lambda y: (y.t() * w).sum()


class Kept(torch.autograd.Function):
    """y = x^2 that keeps x on ctx, as in lesson 04."""

    @staticmethod
    def forward(ctx, x, keep):
        keep(ctx, x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * (ctx.x if hasattr(ctx, "x") else ctx.saved_tensors[0]) * dy, None


class Marked(torch.autograd.Function):
    """y = x^2, marked."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


def test_every_line_of_code_is_run_here():
    source = Path(__file__).read_text()
    assert len(CODE) >= 15
    assert TEXT.count("<code") + TEXT.count("<pre") == len(CODE), "a line of code without a name"
    for name in CODE:
        assert f'CODE["{name}"]' in source, name


def test_the_check_of_strides_prints_those_of_dy(capsys):
    assert prints(of(specimens.ReadsFlat), capsys) == "(1, 2)\n"
    assert run(CODE["contiguous"], dy=torch.ones(3, 2).t())["dy"].stride() == (3, 1)


def test_the_check_of_clone_finds_a_dense_layout():
    assert run(CODE["clone"], dy=torch.ones(1).expand(2, 3))
    assert not run(CODE["clone"], dy=torch.ones(3, 2).t())


def test_the_check_by_gradcheck_finds_a_flat_read():
    x = leaf(2, 3, dtype=torch.float64)
    assert run(CODE["gradcheck"], f=of(specimens.ReadsStrides), x=x)
    with pytest.raises(GradcheckError):
        run(CODE["gradcheck"], f=of(specimens.ReadsFlat), x=x)
    assert torch.autograd.gradcheck(of(specimens.ReadsFlat), x)


def test_the_check_of_the_saved_tensor():
    assert run(CODE["saved"], f=of(specimens.GradientInNewMemory), x=leaf())
    assert not run(CODE["saved"], f=of(specimens.GradientInSaved), x=leaf())
    made = run(CODE["new_memory"], x=torch.ones(2))["dx"]
    assert made.shape == (2,)


def test_the_check_of_a_stolen_gradient():
    for function, wanted in ((specimens.GradientInNewMemory, False), (specimens.GradientInSaved, True)):
        x = leaf()
        of(function)(x.view(6)).sum().backward()
        assert run(CODE["stolen"], x=x) == wanted


def test_the_check_of_the_upstream_gradient():
    for function, wanted in ((specimens.DoublesInNewMemory, True), (specimens.DoublesInPlace, False)):
        x = leaf()
        assert run(CODE["upstream"], y=of(function)(x), x=x) == wanted


def test_the_check_of_two_gradients_in_one_memory_and_its_cure():
    weights = torch.arange(1.0, 7.0)
    a, b = (torch.zeros(2, 3, requires_grad=True) for _ in "ab")
    ((a.view(6) + b.view(6)) * weights).sum().backward()
    assert run(CODE["shared"], a=a, b=b)
    a, b = (torch.zeros(2, 3, requires_grad=True) for _ in "ab")
    for _ in (1, 2):
        (run(CODE["add_first"], a=a, b=b) * weights).sum().backward()
    assert not run(CODE["shared"], a=a, b=b)
    assert a.grad.flatten().tolist() == b.grad.flatten().tolist() == [2, 4, 6, 8, 10, 12]


def test_the_poison_finds_what_nobody_wrote():
    torch.use_deterministic_algorithms(False)
    run(CODE["poison"])
    for function, wanted in ((specimens.DoublesInNewMemory, False), (specimens.WritesHalf, True)):
        x = leaf(4, 1)
        of(function)(x).backward(torch.ones_like(x))
        assert bool(x.grad.isnan().any()) == wanted


def test_the_check_of_what_is_checked():
    keeps = {"saved": lambda ctx, x: ctx.save_for_backward(x), "on ctx": lambda ctx, x: setattr(ctx, "x", x)}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(CODE["checked"], f=of(Kept, keeps["saved"]), x=leaf())
    run(CODE["checked"], f=of(Kept, keeps["on ctx"]), x=leaf())


def test_the_field_test_of_layout():
    for function, wanted in ((specimens.ReadsStrides, True), (specimens.ReadsFlat, False)):
        assert run(CODE["test_01"], f=of(function), x=leaf(), follow=transposed(function), **run(CODE["grad"])) == wanted


def test_the_field_test_of_x_dy_and_twice():
    found = {
        function.__name__: run(CODE["test_02"], f=of(function), x=leaf(2, 4))
        for function in (specimens.GradientInNewMemory, specimens.DoublesUpstream, specimens.GradientInSaved)
    }
    assert found == {
        "GradientInNewMemory": (True, True, True),
        "DoublesUpstream": (True, False, False),
        "GradientInSaved": (False, True, False),
    }


def test_the_field_test_of_both_orders():
    for function, wanted in ((specimens.DoublesInNewMemory, True), (specimens.DoublesInPlace, False)):
        assert run(CODE["test_03"], f=of(function), x=leaf(3)) == wanted


def test_the_field_test_of_a_second_derivative():
    assert run(CODE["test_04"], f=rawgrad.square, x=leaf(3))
    assert not run(CODE["test_04"], f=of(specimens.GradientInForward), x=leaf(3))
    assert not run(CODE["test_04"], f=Marked.apply, x=leaf(3))
    with pytest.raises(RuntimeError, match="no second derivative"):
        run(CODE["test_04"], f=of(specimens.OneShot), x=leaf(3) + 0)


def test_the_numbers_of_the_symptoms_are_those_of_the_lessons():
    run = scenarios.version_timeline(before="nothing")
    assert [backward.grad for backward in run.backwards] == [2, 6, 14]
    assert scenarios.siblings(scenarios.RESIDUAL).grads["a"] == ((20, 40, 60), (15, 30, 45))
    assert "2, 6, 14 where 2, 4, 6" in TEXT
    assert "20&nbsp;40&nbsp;60 for 15&nbsp;30&nbsp;45" in TEXT


# Print


def letters(text: str) -> str:
    """Every character that prints, in order. Where lines break is the printer's business."""
    return re.sub(r"\s", "", text)


def pdf_text(pdf: bytes) -> str:
    """What a PDF of Chromium's says, in the order in which it is painted: enough of the format for that, and no more."""
    objects = {int(n): body for n, body in re.findall(rb"(?<=\n)(\d+) 0 obj\n(.*?)\nendobj", pdf, re.DOTALL)}

    def stream(number: int) -> bytes:
        return zlib.decompress(objects[number].partition(b"stream\n")[2].rpartition(b"\nendstream")[0])

    fonts = {}
    for number, body in objects.items():
        if found := re.search(rb"/ToUnicode (\d+) 0 R", body):
            meaning = stream(int(found[1])).decode()
            fonts[number] = to_unicode(meaning)
    said = []
    for page in (body for body in objects.values() if b"/Type /Page\n" in body):
        names = {name: fonts[int(n)] for name, n in re.findall(rb"/(F\d+) (\d+) 0 R", page)}
        painted = stream(int(re.search(rb"/Contents (\d+) 0 R", page)[1]))
        font: dict[str, str] = {}
        for name, glyphs in re.findall(rb"/(F\d+) [\d.]+ Tf|<([0-9A-F]+)> Tj", painted):
            font = names[name] if name else font
            said += [font[glyphs[at : at + 4].decode().lower()] for at in range(0, len(glyphs), 4)]
    return "".join(said)


def to_unicode(meaning: str) -> dict[str, str]:
    """Glyph -> text, from a ToUnicode map."""

    def text(code: str) -> str:
        return bytes.fromhex(code).decode("utf-16-be")

    found = {}
    for block in re.findall(r"beginbfchar(.*?)endbfchar", meaning, re.DOTALL):
        for glyph, code in re.findall(r"<(\w+)> <(\w+)>", block):
            found[glyph.lower()] = text(code)
    for block in re.findall(r"beginbfrange(.*?)endbfrange", meaning, re.DOTALL):
        for first, last, code in re.findall(r"<(\w+)> <(\w+)> <(\w+)>", block):
            for step in range(int(last, 16) - int(first, 16) + 1):
                found[f"{int(first, 16) + step:04x}"] = chr(ord(text(code)) + step)
    return found


def html_text() -> str:
    body = TEXT.partition("<body>")[2]
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def test_the_pdf_is_one_page_that_says_what_the_html_says():
    pdf = handout.PDF.read_bytes()
    assert pdf.count(b"/Type /Page\n") == 1
    assert len(pdf) < 100_000
    assert letters(pdf_text(pdf)) == letters(html_text()), "make handout"


def test_it_needs_nothing_from_elsewhere():
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link", TEXT)


def test_every_colour_has_its_letter_and_is_of_okabe_and_ito():
    colours = set(re.findall(r"#[0-9A-Fa-f]{3,6}\b", TEXT.partition("</style>")[0]))
    assert colours == {"#fff", "#000", "#E69F00", "#56B4E9"}
    assert set(re.findall(r'<span class="mark ([^"]+)">(\w)</span>', TEXT)) == {("S", "S"), ("L", "L")}
    assert TEXT.count('class="mark') == len(re.findall(r'<span class="mark (\w)">\1</span>', TEXT))


def test_two_prints_that_differ_in_date_and_names_are_settled_to_one():
    one, other = (
        b"/ID (node%s) /ID (node%s) /Headers [(node%s)]\n<</Limits [%s]\n/Names [%s]>> /CreationDate (D:%s+00'00')"
        % (first, second, first, limits, names, date)
        for first, second, limits, names, date in (
            (b"00000018", b"00000020", b"(node00000018) (node00000020)",
             b"(node00000018) 7 0 R (node00000020) 9 0 R", b"20261201043926"),
            (b"00000131", b"00000042", b"(node00000042) (node00000131)",
             b"(node00000042) 9 0 R (node00000131) 7 0 R", b"20270101000000"),
        )
    )  # fmt: skip
    assert handout.settled(one) == handout.settled(other)
    assert handout.settled(one).startswith(b"/ID (node00000000) /ID (node00000001) /Headers [(node00000000)]")
    assert b"/Names [(node00000000) 7 0 R (node00000001) 9 0 R]" in handout.settled(other)
    assert len(handout.settled(other)) == len(other)


def test_without_a_browser_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(handout.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no Chromium here to print with: apt install chromium"):
        handout.main()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)("no Chromium here: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=handout.FLAGS)
        yield browser
        browser.close()


# A font that is not there leaves a text as wide as the generic one behind it does.
HAS_FONTS = """() => {
    const pen = document.createElement('canvas').getContext('2d')
    const wide = font => { pen.font = '20px ' + font; return pen.measureText('will it fit').width }
    return wide('Arial, "Liberation Sans", monospace') != wide('monospace')
}"""
PAPERS = {"A4": (297, 210), "Letter": (279.4, 215.9)}


@pytest.mark.browser
@pytest.mark.parametrize("paper", PAPERS)
def test_nothing_is_cut_off_and_nothing_is_small(browser, paper):
    page = handout.open_handout(browser)
    if not page.evaluate(HAS_FONTS):
        pytest.skip("no Arial here, and no Liberation of its widths: apt install fonts-liberation")
    width, height = ((side - 16) / 25.4 * 96 for side in PAPERS[paper])
    page.set_viewport_size({"width": int(width), "height": int(height)})
    bottom, right, smallest, spilt = page.evaluate("""() => {
        const all = [...document.body.querySelectorAll('*')], boxes = all.map(e => e.getBoundingClientRect())
        return [Math.max(...boxes.map(b => b.bottom)), Math.max(...boxes.map(b => b.right)),
                Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize))) * 72 / 96,
                all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.textContent)]
    }""")
    assert bottom <= height
    assert right <= width
    assert smallest >= 9
    assert spilt == []
    edge = dict.fromkeys(("top", "bottom", "left", "right"), "8mm")
    pdf = handout.printed(page, format=paper, landscape=True, margin=edge)
    assert pdf.count(b"/Type /Page\n") == 1
    page.close()


@pytest.mark.browser
def test_two_prints_are_equal(browser):
    first, second = (handout.printed(handout.open_handout(browser)) for _ in (1, 2))
    assert first == second
    assert letters(pdf_text(first)) == letters(html_text())


@pytest.mark.browser
def test_a_screen_reader_finds_its_way(browser):
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page()
    page.goto(handout.HTML.as_uri())
    assert [found["id"] for found in Axe().run(page).response["violations"]] == []
    page.close()
