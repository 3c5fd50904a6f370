"""What models are given."""
