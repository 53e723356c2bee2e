"""What a check is: a generator that yields (verdict, evidence) for a Subject, with a name, a remedy and a lesson."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rawgrad.doctor.report import Finding
from rawgrad.doctor.subject import Filled, Refused, Subject, sort

Seen = Iterator[tuple[str, str] | tuple[str, str, bool]]  # verdict, evidence, and whether it is silent where that is not plain


@dataclass(frozen=True)
class Check:
    """A check, named for the healthy behaviour."""

    name: str
    look: Callable[[Subject], Seen]
    remedy: str
    lesson: str

    def findings(self, subject: Subject) -> list[Finding]:
        """All that it saw, at least one. What the Function raises becomes evidence."""
        seen = []
        try:
            with Filled(subject):
                for verdict, evidence, *silent in self.look(subject):
                    seen.append(self._finding(verdict, evidence, silent[0] if silent else True))
        except Exception as problem:
            refused = isinstance(problem := sort(problem), Refused)
            seen.append(self._finding("refused" if refused else "broken", str(problem), False))
        finally:
            subject.fill = 0.0
        return seen or [self._finding("healthy", "", False)]

    def _finding(self, verdict: str, evidence: str, silent: bool) -> Finding:
        told = verdict in ("broken", "unsafe")
        return Finding(self.name, verdict, silent and told, evidence, self.remedy if told else "", self.lesson)


CHECKS: dict[str, Check] = {}


def check(remedy: str, lesson: str) -> Callable:
    """Make a generator function a check of its own name."""

    def register(look: Callable[[Subject], Seen]) -> Callable[[Subject], Seen]:
        CHECKS[look.__name__] = Check(look.__name__, look, remedy, lesson)
        return look

    return register
