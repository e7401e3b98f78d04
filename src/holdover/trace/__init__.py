"""Recording a training step: what ran, which storages it made, and what autograd kept for backward."""
