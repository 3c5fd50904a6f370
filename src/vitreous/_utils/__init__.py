"""Small things that belong to no part of the package."""
