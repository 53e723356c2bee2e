"""`make handout`: print docs/handout.html to docs/handout.pdf, one page, by Chromium.

Chromium writes the time of printing into a PDF, and names that go on counting. Both are made the same, so that two prints by
one Chromium are equal byte for byte. Another Chromium, or other fonts, give other bytes and the same text.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HTML, PDF = ROOT / "docs" / "handout.html", ROOT / "docs" / "handout.pdf"
NAMES = ("chromium", "google-chrome", "chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


def chromium() -> str | None:
    """The first Chromium on the path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def settled(pdf: bytes) -> bytes:
    """`pdf` with one date, and its table headers named in the order of their objects, since Chromium's names go on counting.

    All lengths stay, so that no offset in the file moves.
    """
    pdf = re.sub(rb"(?<=Date \(D:)\d{14}", b"20000101000000", pdf)
    leaf = re.compile(rb"/Limits \[\(node\d{8}\) \(node\d{8}\)\]\n/Names \[(.*?)\]")  # the index of the names, sorted by them
    names = re.findall(rb"\(node(\d{8})\) (\d+) 0 R", b"".join(leaf.findall(pdf)))
    new = {name: b"%08d" % n for n, (name, _) in enumerate(sorted(names, key=lambda entry: int(entry[1])))}
    pdf = re.sub(rb"(?<=\(node)\d{8}(?=\))", lambda found: new[found[0]], pdf)

    def sort(found: re.Match) -> bytes:
        entries = sorted(re.findall(rb"\(node\d{8}\) \d+ 0 R", found[1]))
        first, last = entries[0].partition(b" ")[0], entries[-1].partition(b" ")[0]
        return b"/Limits [%s %s]\n/Names [%s]" % (first, last, b" ".join(entries))

    return leaf.sub(sort, pdf)


def printed(page, **paper) -> bytes:
    """The PDF that `page` prints: on the paper that its style asks for, or on `paper`. Tagged, for screen readers."""
    return settled(page.pdf(print_background=True, tagged=True, **(paper or {"prefer_css_page_size": True})))


def open_handout(browser):
    """A page that shows the handout as print does."""
    page = browser.new_page()
    page.goto(HTML.as_uri())
    page.emulate_media(media="print")
    return page


def main() -> None:
    path = chromium()
    if path is None:
        sys.exit("no Chromium here to print with: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        PDF.write_bytes(printed(open_handout(browser)))
        browser.close()
    print(f"{PDF.relative_to(ROOT)}: {PDF.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
