"""`python -m mm_plugin.cli`."""

from __future__ import annotations

import sys

from mm_plugin.cli.main import main

sys.exit(main())
