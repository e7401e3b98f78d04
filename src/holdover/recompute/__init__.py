"""The runtime: what a plan drops after forward, and makes again in backward by running the recorded ops once more."""
