"""Which neighbours an epsilon compares is written in one module and in one section of the documents."""

from __future__ import annotations

import re
from pathlib import Path

from modelmix.accounting.adjacency import relation

ROOT = Path(__file__).parents[1]
ALLOWED = {"src/modelmix/accounting/adjacency.py", "docs/sharp-edges.md"}
SECTION = "docs/accountant.md"
UNIT = r"(a|an|one|the|any|another|every|single)?\s*\W*(sample|image|record|example|unit|person|point)"
CLAIMS = re.compile(
    rf"\b(add(s|ed|ing)?|insert(s|ed|ing)?)\b\W+(or|and)\W+\b(remov|delet)\w*"
    rf"|\b(remov(e|es|ing)|delet(e|es|ing))\W+{UNIT}\b"
    rf"|{UNIT}\W+(is|are)\W+(added|removed|deleted)\b",
    re.IGNORECASE,
)
NAME = re.compile(r"add[-_]or[-_]remove", re.IGNORECASE)


def sources():
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "lab/src").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def claims(text):
    """Sentences about adding or removing a sample; the name of the relation is not one."""
    return [found.group() for found in CLAIMS.finditer(NAME.sub("NAME", re.sub(r"\s+", " ", text)))]


def test_no_second_sentence_about_adding_or_removing_a_sample():
    found = {}
    for name, text in sources().items():
        text = text.replace(relation("zero-out", "sample", None), "")  # as the program prints it
        if name == SECTION:
            text = text[: text.index("## 12. Adjacency")]
        if name not in ALLOWED and (said := claims(text)):
            found[name] = said
    assert found == {}


def test_the_search_sees_what_it_looks_for():
    for sentence in (
        "Holds when one sample is added or removed.",
        "two datasets differ by adding or removing one sample",
        "under adding\nand removing a sample",
        "removing a sample is the worst",
    ):
        assert claims(sentence), sentence
    assert not claims("the contribution of one sample is zeroed; add-or-remove")
    assert claims((ROOT / "src/modelmix/accounting/adjacency.py").read_text(encoding="utf-8"))
    assert claims(sources()[SECTION].split("## 12. Adjacency")[1])
