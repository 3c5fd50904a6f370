"""Self-contained HTML pages, from Jinja2 templates: nothing is fetched, nothing runs, all text is escaped."""
