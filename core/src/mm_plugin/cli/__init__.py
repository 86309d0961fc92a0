"""The command `mm-plugin`: `list`, `doctor` and `demo`. Knows no model."""
