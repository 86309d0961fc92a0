"""Files of every container that is opened, built from random pieces with hostile numbers. Imports neither torch nor a plugin."""
