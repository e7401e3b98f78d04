"""The report page: one self-contained file, drawn from plain data that is embedded in it."""
