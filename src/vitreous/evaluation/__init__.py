"""Running methods over data sets under a protocol, and what the results say."""
