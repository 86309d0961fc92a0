"""Ratios against what the same machine reaches at the same moment; `python -m benchmarks`. See README.md."""

import os

# Before torch is loaded: GNU OpenMP reads it once. Spinning threads slow small operations many times on shared machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
