"""`PluginRecord`: what is known of one installed plugin, as plain data. Knows no plugin's code."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["available", "loaded", "disabled", "failed", "conflict", "incompatible", "shadowed"]


class OpenedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin that makes a spec for each checkpoint (`ModelSpec.specialize`) made of one.

    Attributes:
        checkpoint: the folder.
        model: name of the spec that it made; None if it refused.
        notes: what the plugin says about it, such as which code prepares media.
        error: why it refused.
    """

    checkpoint: str
    model: str | None = None
    notes: dict[str, str] = {}
    error: str | None = None


class PluginRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one installed plugin, broken or not: a snapshot.

    Example:
        >>> record = PluginRecord(
        ...     name="tiny", distribution="mm-plugin-tiny", version="1.0", entry_point="tiny.hooks", location="/site",
        ...     claims={"architectures": ("TinyVL",)}, state="failed", stage="import", error_type="ModuleNotFoundError",
        ...     error="No module named 'av'", hint="pip install av",
        ... )
        >>> record.summary()
        "tiny (mm-plugin-tiny 1.0): failed at import: ModuleNotFoundError: No module named 'av' -> pip install av"

    Attributes:
        name: its entry point's name in the group `mm_plugin`.
        distribution: the installed distribution.
        version: that distribution's version.
        entry_point: the hooks module.
        location: the folder that contains it.
        claims: what its metadata says it serves, by kind: `architectures`, `model_types`, `fallback`, `digests`, `stores`,
            `observers`.
        state: `available` (not imported yet), `loaded`, `disabled`, `failed`, `conflict`, `incompatible`, or
            `shadowed` by a distribution of the same name that is earlier on the path.
        stage: where it failed: `discover`, `requirements`, `import`, `hooks`, `register`, `spec` or `classes`.
        code: the kind of fault, one word.
        error_type: class of the exception; None for a fault that the registry found.
        error: message of the exception, or of the registry.
        where: `file:line` of the last frame inside the plugin.
        missing: the module or distribution that is missing.
        hint: one command to run, or one thing to change.
        report_to: where the plugin's authors take reports.
        traceback: the whole traceback as text.
        elapsed_ms: how long its import and registration took, milliseconds.
        opened: what it made of each checkpoint that was opened with it, if it makes a spec for each.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    location: str
    claims: dict[str, tuple[str, ...]]
    state: State
    stage: str | None = None
    code: str | None = None
    error_type: str | None = None
    error: str | None = None
    where: str | None = None
    missing: str | None = None
    hint: str | None = None
    report_to: str | None = None
    traceback: str | None = None
    elapsed_ms: float | None = None
    opened: tuple[OpenedModel, ...] = ()

    def summary(self) -> str:
        """One line: which plugin, its state, what is wrong, and what to do."""
        line = f"{self.name} ({self.distribution} {self.version}): {self.state}"
        if self.stage:
            line += f" at {self.stage}"
        if self.error:
            kind = f"{self.error_type}: " if self.error_type else ""
            line += f": {kind}{self.error}"
        if self.where:
            line += f" [{self.where}]"
        if self.hint:
            line += f" -> {self.hint}"
        return line


class Refusal(Exception):
    """A fault that the registry found in a plugin, with what the record will say. Never leaves this package."""

    def __init__(self, message: str, *, code: str, hint: str | None = None, missing: str | None = None) -> None:
        super().__init__(message)
        self.code, self.hint, self.missing = code, hint, missing
