"""The project's words: one noun for one thing, American spelling, and no name that has been replaced (see vocabulary.py)."""

from __future__ import annotations

import pytest
from vocabulary import ROOT, files, findings, package, search

SHOWN = 20
PACKAGES = sorted({package(str(path.relative_to(ROOT))) for path in files()})


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_uses_the_words_of_the_field(name: str) -> None:
    found = findings(name)
    shown = "\n".join(map(str, found[:SHOWN]))
    assert not found, (
        f"{len(found)} findings, the first are\n{shown}\n(python tests/vocabulary.py {name} shows every one)"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("two pictures", "pictures"),
        ("class PictureSize:", "Picture"),
        ("old_picture = 1", "picture"),
        ("a rate of 0 is none", "is none"),
        ("# a value that is\n    # no array", "is no"),
        ('"""It is\n    no array."""', "is no"),
        ("what stands behind it", "behind"),
        ("the colour", "colour"),
        ("it normalises", "normalises"),
        ("def initialise_all():", "initialise"),
        ("the organisation", "organisation"),
        ("from mm_plugin.spec import NeutralError", "NeutralError"),
        ("tone: Annotated[int, For(request)]", "For("),
        ("except Unlike as error:", "except Unlike"),
        ("mm_plugin.imaging.resize", "mm_plugin.imaging"),
    ],
)
def test_a_wrong_word_is_found_where_it_stands(text: str, found: str) -> None:
    seen = [(finding.found.split("\n")[0], finding.line) for finding in search(f"first line\n{text}", "a.py")]
    ((said, line),) = seen
    assert said.startswith(found)
    assert line == 2


@pytest.mark.parametrize(
    "text",
    [
        "pixels.clip(0, 255)",
        "torch.clip_(values)",
        'preset="medium"',
        "there is no such file, and there are none beside it",
        "it is no longer needed",
        "otherwise a precise noise is raised, elementwise",
        "processes leave nothing behind",
        "clipped to a range",
        "Unlike transformers, this reads headers",
        "a question of headroom",
        "promises, exercises and premises are revised; a likewise concise franchise",
        "isinstance(value, list) and comprising, rising, advising, arising, surprising",
    ],
)
def test_a_true_use_is_not_found(text: str) -> None:
    assert list(search(text, "a.py")) == []


def test_every_package_is_searched() -> None:
    assert {"core/media", "core/tests", "core/registry", "docs", "root", "tests", "benchmarks", "plugins/qwen2_vl"} <= {
        *PACKAGES
    }
