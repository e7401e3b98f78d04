"""holdover inside other software."""
