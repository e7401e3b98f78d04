"""What the closed form raises for a configuration that cannot be."""

from __future__ import annotations

from holdover.errors import HoldoverError


class ConfigurationError(HoldoverError, ValueError):
    """The model, the layout or the recomputation contradicts itself. The message says what to change."""
