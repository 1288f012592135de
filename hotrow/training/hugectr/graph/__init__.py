"""The layers of a model: added by a script, or read from HugeCTR's JSON and written as it."""
