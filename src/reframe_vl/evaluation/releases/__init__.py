"""Published benchmarks as they lie on disk: rows of any format, and the media that rows name."""
