"""Which distribution's broken metadata made foreign code fail. Reads nothing itself: it looks at where an exception came from."""

from __future__ import annotations

from typing import NamedTuple


class BrokenMetadata(NamedTuple):
    """A distribution whose metadata cannot be read.

    Attributes:
        name: of the distribution; that of its metadata's folder where it does not say.
        place: the folder of its metadata.
    """

    name: str
    place: str


def broken_metadata(error: BaseException) -> BrokenMetadata | None:
    """The distribution whose metadata could not be read when whoever raised this asked for it; None if that is not the reason.

    A library that looks for its own plugins, as torch does when it is imported, reads the entry points of every distribution, so
    that one broken file makes the import of any other package fail.

    Example:
        >>> broken_metadata(ValueError("of another kind")) is None
        True
    """
    found, trace = None, error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        inside = module.startswith(("importlib.metadata", "importlib_metadata"))
        # Reading a frame's locals makes a dict that the frame keeps: of other frames it would keep the media inputs there alive.
        owner = trace.tb_frame.f_locals.get("self") if inside else None
        if hasattr(owner, "read_text") and hasattr(owner, "locate_file"):
            found = owner
        trace = trace.tb_next
    if found is None:
        return None
    place = str(getattr(found, "_path", "unknown"))
    try:
        name = str(found.metadata["Name"] or "")
    except Exception:
        name = ""
    return BrokenMetadata(name or place.replace("\\", "/").rpartition("/")[2], place)


def in_words(error: BaseException) -> str:
    """The same for the end of a message; empty where broken metadata is not the reason."""
    broken = broken_metadata(error)
    if broken is None:
        return ""
    return f" (the metadata of the distribution {broken.name} in {broken.place} cannot be read; reinstall or remove it)"
