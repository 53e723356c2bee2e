"""What an examination found: one Finding for each thing seen, and a Report that says them as text and as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

VERDICTS = ("broken", "unsafe", "refused", "note", "skipped", "healthy")  # the worst first
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    check: str  # named for the healthy behaviour
    verdict: str  # one of VERDICTS
    silent: bool  # nothing is raised where it goes wrong
    evidence: str  # what was seen, with numbers
    remedy: str  # what to do about it; empty where nothing is to be done
    lesson: str  # the notebook that explains it, such as "02"

    @property
    def told(self) -> bool:
        """Worth more than its line in the table."""
        return self.verdict in ("broken", "unsafe")


class Broken(AssertionError):
    """Raised by Report.raise_if_broken."""


@dataclass(frozen=True)
class Report:
    """All findings of one examination, in the order of the checks."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """It ran, and no finding is broken."""
        return self.verdict("runs") != "refused" and not any(finding.verdict == "broken" for finding in self.findings)

    def of(self, check: str) -> tuple[Finding, ...]:
        """The findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def verdict(self, check: str) -> str:
        """The worst verdict of one check; "skipped" where it was not run."""
        return min((finding.verdict for finding in self.of(check)), key=VERDICTS.index, default="skipped")

    def raise_if_broken(self) -> None:
        """For a test suite.

        Raises:
            Broken: with every broken finding, its numbers and its remedy; or with what func raised, where it never ran.
        """
        if self.ok:
            return
        lines = [_headline(self)]
        for finding in self.findings:
            if finding.verdict == "broken":
                lines += [f"  {finding.check} is broken{', silent' if finding.silent else ''}", *_details([finding])]
        raise Broken("\n".join(lines))

    def __repr__(self) -> str:
        lines = [_headline(self)]
        for check in dict.fromkeys(finding.check for finding in self.findings):
            worst = min(self.of(check), key=lambda finding: VERDICTS.index(finding.verdict))
            said = f"  {worst.verdict:8} {check:38} {'silent' if worst.told and worst.silent else '':7}"
            rest = "" if worst.told else worst.evidence
            beside = len(said) + len(rest) <= _WIDTH
            lines.append(f"{said}{rest if beside else ''}".rstrip())
            if not beside:
                lines += wrap(rest, _WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11)
            lines += _details(finding for finding in self.of(check) if finding.told)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for finding in self.findings:
            silent = "silent" if finding.told and finding.silent else ""
            remedy = f"<br><i>{escape(finding.remedy)}</i> (lesson {finding.lesson})" if finding.told else ""
            weight = "bold" if finding.told else "normal"
            cells = (f"<b>{finding.verdict}</b>" if finding.told else finding.verdict, escape(finding.check), silent)
            rows.append(
                f"<tr style='font-weight:{weight}'>"
                + "".join(f"<td style='text-align:left;vertical-align:top'>{cell}</td>" for cell in cells)
                + f"<td style='text-align:left;font-weight:normal'>{escape(finding.evidence)}{remedy}</td></tr>"
            )
        head = "".join(f"<th scope='col' style='text-align:left'>{name}</th>" for name in ("verdict", "check", "", "evidence"))
        return f"<p>{escape(_headline(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _headline(report: Report) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in report.findings) for verdict in VERDICTS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if report.verdict("runs") == "refused":
        return f"{report.subject}: NOT EXAMINED, {report.of('runs')[0].evidence}"
    return f"{report.subject}: {'nothing is broken' if report.ok else 'BROKEN'} ({said})"


def _details(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines += wrap(f"{finding.verdict}: {finding.evidence}", _WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 13)
        remedy = f"{finding.remedy} (lesson {finding.lesson})"
        lines += wrap(remedy, _WIDTH, initial_indent=" " * 11 + "-> ", subsequent_indent=" " * 14)
    return lines
