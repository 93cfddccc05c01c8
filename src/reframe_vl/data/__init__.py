"""Records, the pipeline that builds them, and the DataModule that serves them."""
