"""Installed distributions that have entry points of ours: all of the path, and which of one name hides another."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import importlib_metadata

_SECTION = re.compile(r"\[\s*(?P<group>[^\]]+?)\s*\]")
_LINE = re.compile(r"(?P<name>[^=#;\ufffd]+?)\s*=\s*(?P<value>[^\ufffd]+)")


class Entry(NamedTuple):
    """One line of entry points: its group, its name, and the module that it names."""

    group: str
    name: str
    value: str


class Distribution:
    """One distribution on the path; what is asked of its metadata is read once. Final.

    Args:
        found: as importlib.metadata gives it.

    Attributes:
        found: the same.
        place: the folder or file of its metadata.
        entries: its entry points in groups that are asked for, each once.
        unreadable: why its entry points cannot be read; None where they can.
        hidden_by: the distribution of the same name that is used in its place.
    """

    def __init__(self, found: Any) -> None:
        self.found = found
        # Only those that a finder of another kind gives have no path; each of them is one of its own.
        self.place = _quietly(lambda: os.path.realpath(str(found._path)), f"finder {id(found)}")  # noqa: SLF001
        self.entries: tuple[Entry, ...] = ()
        self.unreadable: str | None = None
        self.hidden_by: Distribution | None = None

    def read(self, wanted: Callable[[str], bool]) -> None:
        """Read the entry points of the groups that are wanted; of a file that cannot be read, the lines that can."""
        try:
            entries = [Entry(entry.group, entry.name, entry.value) for entry in self.found.entry_points]
        except Exception as error:
            self.unreadable = f"{type(error).__name__}: {error}"
            entries = list(_readable_entries(self.found))
        self.entries = tuple(dict.fromkeys(entry for entry in entries if wanted(entry.group)))

    @cached_property
    def key(self) -> str:
        """Its name as the package index compares names; its place where it has no name."""
        folder = Path(self.place)
        known = folder.suffix in (".dist-info", ".egg-info")
        name = folder.stem.partition("-")[0] if known else _quietly(lambda: str(self.found.metadata["Name"] or ""), "")
        return re.sub(r"[-_.]+", "-", name).lower() or self.place

    @cached_property
    def has_metadata(self) -> bool:
        """Whether it says anything of itself; what an interrupted removal left does not."""
        return _quietly(lambda: "yes" if self.found.metadata["Name"] else "", "") == "yes"

    @cached_property
    def name(self) -> str:
        """Its name."""
        return _quietly(lambda: str(self.found.metadata["Name"] or "unknown"), "unknown")

    @cached_property
    def version(self) -> str:
        """Its version."""
        return _quietly(lambda: str(self.found.metadata["Version"] or "unknown"), "unknown")

    @property
    def label(self) -> str:
        """Its name and version; the name of its folder where it has no metadata."""
        if not self.has_metadata:
            return Path(self.place).name
        return f"{self.name} {self.version}"

    @cached_property
    def location(self) -> str:
        """The folder that contains it."""
        return _quietly(lambda: str(self.found.locate_file("")), "unknown")

    @cached_property
    def report_to(self) -> str | None:
        """Where the authors take reports: an issue tracker, a home page, or an address."""
        try:
            return _report_to(self.found.metadata)
        except Exception:
            return None


def find_distributions(wanted: Callable[[str], bool], notice: Callable[[str], None]) -> list[Distribution]:
    """Every distribution on the path that has entry points in the groups that are wanted, or hides one that has.

    Of several of one name the first on the path is used that has metadata, as Python itself does. The others are marked as hidden;
    without metadata, they are what an interrupted removal left, and passed over.

    Args:
        wanted: whether a group of entry points is.
        notice: is called with a line about each whose entry points cannot be read.
    """
    by_key: dict[str, list[Distribution]] = {}
    for distribution in _on_path(notice):
        distribution.read(wanted)
        if distribution.unreadable is not None:
            notice(
                f"distribution {distribution.label} in {distribution.location} has unreadable metadata "
                f"({distribution.unreadable}) and is ignored"
            )
        by_key.setdefault(distribution.key, []).append(distribution)
    kept: list[Distribution] = []
    for same in by_key.values():
        if not any(distribution.entries for distribution in same):
            continue
        used = same[0] if len(same) == 1 else next((one for one in same if one.has_metadata), same[0])
        kept.append(used)
        for distribution in same:
            if distribution is not used and distribution.has_metadata:
                distribution.hidden_by = used
                kept.append(distribution)
    return kept


def _on_path(notice: Callable[[str], None]) -> Iterator[Distribution]:
    """Every distribution, each once, though its folder may be on the path twice."""
    seen: set[str] = set()
    try:
        for found in importlib_metadata.distributions():
            distribution = Distribution(found)
            # pip renames what it removes, with a tilde in front; an interrupted removal leaves it.
            if distribution.place not in seen and not Path(distribution.place).name.startswith("~"):
                seen.add(distribution.place)
                yield distribution
    except Exception as error:
        notice(f"the installed distributions cannot be listed to the end: {type(error).__name__}: {error}")


def _readable_entries(found: Any) -> Iterator[Entry]:
    """The lines of a broken file of entry points that are whole."""
    file = "entry_points.txt"
    text = _quietly(lambda: found._path.joinpath(file).read_bytes().decode(errors="replace"), "")  # noqa: SLF001
    group = None
    for line in map(str.strip, text.splitlines()):
        section = _SECTION.fullmatch(line)
        if section:
            group = section["group"]
        elif group is not None and (entry := _LINE.fullmatch(line)):
            yield Entry(group, entry["name"], entry["value"].strip())


def _report_to(metadata: Any) -> str | None:
    urls = dict(entry.split(",", 1) for entry in metadata.get_all("Project-URL") or () if "," in entry)
    urls = {label.strip().lower(): url.strip() for label, url in urls.items()}
    for word in ("issue", "bug", "tracker", "support", "home", "source", "repo"):
        for label, url in urls.items():
            if word in label:
                return str(url)
    for name in ("Home-page", "Author-email", "Maintainer-email", "Author"):
        value = metadata.get(name)
        if value:
            return str(value)
    return None


def _quietly(read: Callable[[], str], default: str) -> str:
    try:
        return read()
    except Exception:
        return default
