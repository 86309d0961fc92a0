"""Files of a checkpoint, for tests, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_plugin.errors import UsageError


def write(folder: Path, name: str, value: Any) -> None:
    """A file of text, or of a value as JSON."""
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def refused(call: Callable[[], Any], *names: str) -> UsageError:
    """The error of a call, whose message has these names."""
    with pytest.raises(UsageError) as caught:
        call()
    for name in names:
        assert name in str(caught.value)
    return caught.value
