"""Training algorithms: pure functions on tensors, and the LightningModules on them."""
