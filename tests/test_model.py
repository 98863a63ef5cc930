"""The text and the subject of a Finding."""

import pytest

from fairlead.model import Finding, about


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (Finding("Late", "it is late"), "it is late"),
        (Finding("Late", "it is late", remedy="start earlier"), "it is late; start earlier"),
        (Finding("Late", "it is late", evidence="by the clock"), "it is late (by the clock)"),
        (
            Finding("Late", "it is late", evidence="by the clock", remedy="start earlier"),
            "it is late (by the clock); start earlier",
        ),
    ],
)
def test_the_text_contains_evidence_and_remedy(finding: Finding, text: str) -> None:
    assert str(finding) == text


def test_about_sets_the_subject_of_findings_without_one() -> None:
    general, own = Finding("Late", "it is late"), Finding("Full", "it is full", subject="Node n")
    assert [each.subject for each in about("Service default/web", (general, own))] == [
        "Service default/web",
        "Node n",
    ]
