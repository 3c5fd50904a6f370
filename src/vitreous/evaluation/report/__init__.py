"""Reports: stored results as one page that needs nothing else, or as tables for other documents."""
