"""Which words this project does not use, and where they still stand: `python tests/vocabulary.py` prints the findings per package.

One noun for one thing, American spelling, and no name that has been replaced. True uses are listed in `ALLOWED`.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Words that another word replaces, in any identifier and any text: a word of an identifier counts (`PictureSize`, `old_pictures`).
WORDS = {
    "picture": "image",
    "pictures": "images",
    "photograph": "image",
    "photographs": "images",
    "clip": "video, or clamp",
    "clips": "videos",
    "sound": "audio",
    "sounds": "audio inputs",
    "medium": "media input",
    "mediums": "media inputs",
    "room": "module, layer, or space",
    "rooms": "modules, layers",
    "door": "entry point, way in",
    "doors": "entry points",
    "house": "project",
    "marks": "token modalities, or declares",
    "zoo": "corpus",
    "specimen": "entry",
    "specimens": "entries",
    "anew": "again",
    "behind": "after",
    "told": "reported, given",
    "harmed": "corrupted",
    "learnt": "learned",
    "spelt": "spelled",
    "whilst": "while",
    "amongst": "among",
    "behaviour": "behavior",
    "behaviours": "behaviors",
    "colour": "color",
    "colours": "colors",
    "coloured": "colored",
    "neighbour": "neighbor",
    "neighbours": "neighbors",
    "neighbouring": "neighboring",
    "favour": "favor",
    "honour": "honor",
    "honours": "honors",
    "flavour": "flavor",
    "centre": "center",
    "centres": "centers",
    "centred": "centered",
    "grey": "gray",
    "greyscale": "grayscale",
    "licence": "license",
    "defence": "defense",
    "catalogue": "catalog",
    "labelled": "labeled",
    "modelled": "modeled",
    "signalled": "signaled",
    "artefact": "artifact",
    "artefacts": "artifacts",
    "judgement": "judgment",
    "programme": "program",
    "analyse": "analyze",
}

# Names that have been replaced, and turns of phrase that a reader reads twice. The key is a regular expression.
PHRASES = {
    r"(?<![Tt]here )\b(?:is|are|was|were) none\b": "is not, is unsupported, is invalid",
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b)(?=\w)": "is not a",
    r"\bwho(?:ever)? calls\b": "the caller",
    r"\bwhose turn\b": "next",
    r"\bthat is none\b": "that is not one",
    r"\bPrecomputedRows\b": "PrecomputedEmbeddings",
    r"\btakes_row\b": "is_embed",
    r"(?<![\w.])For\(|\bimport For\b|\bFor,": "OptionScope",
    r"\bTakes(?:Videos|Audio|Prepared)\b": "AcceptsVideos, AcceptsAudio, AcceptsPrecomputed",
    r"\b(?:TakesWhole|WholeItem|as_a_whole|prepare_whole)\b|\bclass Whole\b|\bWhole\(": "ProcessesJointly, JointItem, JointOutput",
    r"\bsurround\b": "placeholder_affixes",
    r"\bNeutralError\b|[\"`]neutral[\"`]": "UnattributedError, unattributed",
    r"\bReadBack\b": "DeviceSync",
    r"\bevents\.Fallback\b|\bFallback\(": "HashIgnored, ItemDropped, FallbackUsed",
    r"\bmm_plugin[./]imaging\b|\bimaging\.\w": "transforms",
    r"\bmm_plugin[./]structs\b": "items, inputs",
    r"\bmm_plugin[./]lifecycle\b": "scheduler.lifecycle",
    r"\bencoder[./]towers\b": "encoder.layers",
    r"\bmedia[./](?:heads|inner|sizes|remote|containers)\b": "container_headers, image_headers, types, http, pyav",
    r"\btransformers_auto[./]learning\b": "probing",
    r"\bRotary\b": "Rotary2D",
    r"\bSegments\b": "VarlenAttention",
    r"\b(?:class|raise|except|import) Unlike\b|\bUnlike\(|\bUnlike[,)]": "NotComposable",
    r"\bclass Kind\b|\bKind\.|: Kind\b": "ModalityTraits",
    r"\bclass Alone\b|\bAlone\(": "SingleItemOutput",
    r"\bblame\w*|\bBLAME\b": "owner",
    r"\bauthored\b": "call_author",
    r"\bby_itself\b": "require_itemwise",
    r"\blay_out\b": "measure",
    r"\bPipeline\b": "Processor, flow",
    r"\bMedium\b": "DecodedMedia",
    r"\bguard\(": "translate_errors",
}

# True uses, taken out of a text before it is searched.
ALLOWED = (
    r"\.clip_?\(|\bmode=\"clip\"|\bclip_chunk\b",  # numpy's and torch's, and what engines call to shorten a chunk
    r"\bclip(?:_vision\w*|-vit|_tower|_config)\b|(?<=\W)_clip\(|\bdef _clip\b",  # the model's name in checkpoints
    r"openai/clip\S*|models\.clip\b|_pil_clip\b",  # and in modules
    r"\"medium\"",  # a preset of x264
    r"\bmarks=(?=pytest\b|\[)",  # pytest's
    r"\"marks\"",  # an aspect that snapshot.json records
    r"\bPictureType\b",  # PyAV's
    r"<sound>",  # a token of Audio Flamingo's vocabulary
    r"\bm[ae][kd]e[_ ]room\b|\broom (?:for|to)\b",
    r"\bbehind transparent\b",  # what is seen through pixels
    r"\b(?:leav|left)\w*(?: \w+){0,3} behind\b",
    r"\b(?:question|quotation|exclamation|punctuation) marks\b",
)

_BRITISH = re.compile(r"[a-z]{3,}is(?:e|ed|es|er|ers|ing|ation|ations)")
# Words that end so in American English too.
_SPELLED_SO = re.compile(
    r"(?:\w*(?:wise|rise)|\w*(?:prais|nois|promis|precis|rais|aris|exercis|premis|pois|advis|revis|devis|supervis|compris|surpris|televis"
    r"|disguis|concis|improvis|cruis|bruis|despis|excis|incis|franchis|merchandis|expertis|enterpris|treatis|paradis|demis|tortois|turquois)"
    r"(?:e|ed|es|er|ers|ing|ation|ations))"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

SKIPPED = ("tests/vocabulary.py", "tests/test_vocabulary.py", "tests/snapshot/snapshot.json")
SUFFIXES = (".py", ".pyi", ".md", ".toml", ".ini", ".txt")


@dataclass(frozen=True)
class Finding:
    """A word where it should not stand, and what stands there instead."""

    file: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}: write {self.instead}"


def files() -> list[Path]:
    """Every text of the project that people write."""
    folders = ("core", "plugins", "integrations", "docs", "tests", "benchmarks")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    beside = [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    return sorted(
        path
        for path in (*inside, *beside)
        if path.is_file()
        and str(path.relative_to(ROOT)) not in SKIPPED
        and not {"data", "build", "dist"} & set(path.relative_to(ROOT).parts[:-1])
    )


def package(file: str) -> str:
    """The part of the project that a file belongs to, by which findings are counted."""
    parts = file.split("/")
    if parts[0] == "core" and "mm_plugin" in parts:
        return "core/" + parts[parts.index("mm_plugin") + 1].removesuffix(".py")
    if parts[0] in ("core", "plugins", "integrations"):
        return "/".join(parts[:2]) if len(parts) > 2 else parts[0]
    return parts[0] if len(parts) > 1 else "root"


def search(text: str, file: str) -> Iterator[Finding]:
    """Every finding in a text."""
    for allowed in ALLOWED:
        text = re.sub(allowed, lambda match: " " * len(match[0]), text)
    # A phrase may be wrapped: what begins a line of a comment is a space, and every character keeps its place.
    flat = re.sub(r"\n[ \t]*(?:#:?[ \t]?)?", lambda match: " " * len(match[0]), text)
    flat = re.sub(r"(?<=\S) {2,}(?=\S)", lambda match: " " + "\0" * (len(match[0]) - 1), flat)
    places = [index for index, character in enumerate(flat) if character != "\0"]
    joined = flat.replace("\0", "")
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern, joined):
            yield Finding(file, text.count("\n", 0, places[match.start()]) + 1, match[0].strip(), instead)
    for number, line in enumerate(text.split("\n"), 1):
        for match in _WORD.finditer(line):
            word = match[0].lower()
            if match[0] != "CLIP" and word in WORDS:
                yield Finding(file, number, match[0], WORDS[word])
            elif _BRITISH.fullmatch(word) and not _SPELLED_SO.fullmatch(word):
                yield Finding(
                    file, number, match[0], re.sub(r"is(?=(?:e|ed|es|er|ers|ing|ation|ations)$)", "iz", match[0])
                )


def findings(part: str | None = None) -> list[Finding]:
    """Every finding, or those of one package."""
    found = []
    for path in files():
        file = str(path.relative_to(ROOT))
        if part is None or package(file) == part:
            found += search(file, file)  # its name too
            found += search(path.read_text(encoding="utf-8"), file)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", help="show each finding of this package; `all` shows every one")
    chosen = parser.parse_args().package
    found = findings(None if chosen == "all" else chosen)
    if chosen:
        print("\n".join(map(str, found)))
    for name, count in sorted(Counter(package(finding.file) for finding in found).items()):
        print(f"{count:5d} {name}")
    print(f"{len(found):5d} in {len(files())} files")


if __name__ == "__main__":
    main()
