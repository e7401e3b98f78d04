"""Running single kernels on made-up arguments, and remembering on disk what was measured."""
