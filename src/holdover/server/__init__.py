"""`holdover serve`: the report page on this machine, with a form that records and plans again."""
