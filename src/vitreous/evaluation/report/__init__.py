"""Reports: stored results as a self-contained HTML page, or as tables for other documents."""
