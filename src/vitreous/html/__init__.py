"""Self-contained HTML pages: nothing is fetched, nothing runs, everything that is text is escaped."""
