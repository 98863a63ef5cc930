"""The page of each finding, for `fairlead doctor explain` and docs/doctor.md. Pure values.

In: the code of a finding. Out: its page as Markdown, the same text in both places."""

import textwrap

import msgspec

from fairlead.doctor.page_texts import TEXTS

WIDTH = 138


class Page(msgspec.Struct, frozen=True):
    """`meaning`: what is wrong, and what users see. `known`: the facts from which it is known, and
    when it is not reported. `remedy`: what to do, and who. `source`: where the rule comes from."""

    code: str
    meaning: str
    known: str
    remedy: str
    source: str

    def render(self) -> str:
        """Return the page as Markdown."""
        parts = (
            self.meaning,
            f"*How it is known.* {self.known}",
            f"*Remedy.* {self.remedy}",
            f"*Source.* {self.source}",
        )
        text = "\n\n".join(
            textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False)
            for each in parts
        )
        return f"### {self.code}\n\n{text}\n"


PAGES = {each[0]: Page(*each) for each in TEXTS}
